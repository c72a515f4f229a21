"""OpenTelemetry's spans by its conventions for generative AI, in OTLP's JSON: one span a turn.

Source: semantic conventions for GenAI v0.1 (in development): `gen_ai.operation.name`, `gen_ai.request.model`,
`gen_ai.input.messages` and `gen_ai.output.messages` (roles with parts: text, reasoning, tool_call, tool_call_response),
`gen_ai.usage.*`, `gen_ai.conversation.id`, `gen_ai.response.id`. What they have no name for is in `kcap.turn`, as JSON.
Texts are there where they were kept.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.flashinfer.agents import AgentTurns, Asked, Form, form, link, openai_message
from kcap.schemas.flashinfer.agents.common.own import further, own_fields, own_turn, whole_turns
from kcap.schemas.flashinfer.agents.common.spans import Span, json_attribute, read_spans, reads_spans, write_spans
from kcap.schemas.recording.conversations import Message, objects
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger

OWN = "kcap.turn"
INPUT, OUTPUT, OPERATION = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.operation.name"
OPERATIONS = {"chat": "chat", "responses": "chat", "completion": "text_completion"}
PARAMETERS = {
    name: f"gen_ai.request.{name}"
    for name in ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
}
USAGE = {
    "prompt": "gen_ai.usage.input_tokens",
    "generated": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
}
DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@form("opentelemetry")
class OpenTelemetry(Form):
    def reads(self, document: Any) -> bool:
        return reads_spans(document, "gen_ai.")

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        spans = []
        for span in read_spans(parse_json(content, DOCUMENT, place), place):
            if span.attributes.get(OPERATION) in OPERATIONS.values():
                spans.append(span)
            else:
                losses["a span that asks no model"] += 1
        return AgentTurns(read_turn_spans(spans, place, OWN, _asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        turns = whole_turns(trace, lambda messages: "", losses)
        return {"spans": write_spans((w.turn.session, w.turn.number, _span(w.turn, w.messages)) for w in turns)}


def read_turn_spans(spans: list[Span], place: str, own: str, asked: Any) -> list[Turn]:
    """The turns of spans: as they were written where each has the attribute `own`, else linked by their messages.

    `asked(span, place)` is an Asked; its `fields` are those of a Turn.
    """
    every = [asked(span, f"{place}: {span.name}") for span in spans]
    if not spans or not all(own in span.attributes for span in spans):
        return link(every)
    turns = []
    for number, (span, one) in enumerate(zip(spans, every, strict=True)):
        where = f"{place}: {span.name} ({number})"
        fields = {name: value for name, value in one.fields.items() if name != "usage"}
        answers = [] if one.answer is None else [(one.answer, one.finish), *one.others]
        members = json_attribute(span.attributes, own, where)
        turns.append(own_turn(number, members, one.messages, answers, one.fields.get("usage"), fields, where))
    return turns


def _span(turn: Turn, messages: list[TurnMessage]) -> Span:
    attributes: dict[str, Any] = {
        OPERATION: OPERATIONS[turn.api],
        "gen_ai.provider.name": "kcap",
        "gen_ai.request.model": turn.model,
        "gen_ai.conversation.id": str(turn.session),
        "gen_ai.response.id": turn.id,
        "gen_ai.response.finish_reasons": [answer.finish for answer in turn.answers],
        INPUT: orjson.dumps([_message(message) for message in messages]).decode(),
        OUTPUT: orjson.dumps([_message(answer) | {"finish_reason": answer.finish} for answer in turn.answers]).decode(),
    }
    attributes |= {PARAMETERS[name]: value for name, value in turn.parameters.items() if name in PARAMETERS}
    usage = turn.usage.model_dump(exclude_none=True) if turn.usage else {}
    attributes |= {USAGE[name]: count for name, count in usage.items()}
    own = own_fields(turn) | ({"usage_known": True} if turn.usage else {})
    attributes[OWN] = orjson.dumps(own).decode()
    if turn.error or turn.aborted:
        attributes["error.type"] = turn.error or "aborted"
    return Span(f"chat {turn.model}".strip(), turn.sent, turn.ended, attributes)


def _message(message: TurnMessage) -> dict[str, Any]:
    """As the conventions have it; what they do not tell of it is in members that they do not have."""
    members = openai_message(message)
    parts: list[dict[str, Any]] = []
    content, rest = members["content"], further(message, members)
    if message.role == "tool" and isinstance(content, str):
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": content})
    elif isinstance(content, str):
        parts.append({"type": "text", "content": content})
    elif content is not None:
        rest["content"] = content
    if message.reasoning_content is not None:
        parts.append({"type": "reasoning", "content": message.reasoning_content})
    for call in message.tool_calls or ():
        function = call.get("function") if isinstance(call.get("function"), dict) else None
        if function is None or set(call) - {"id", "type", "function"} or set(function) - {"name", "arguments"}:
            rest["tool_calls"] = message.tool_calls  # as they are, since the conventions have less
        else:
            parts.append(
                {
                    "type": "tool_call",
                    "id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                }
            )
    names = {name: getattr(message, name) for name in ("name", "refusal") if getattr(message, name) is not None}
    if message.tool_call_id is not None and not (message.role == "tool" and isinstance(content, str)):
        names["tool_call_id"] = message.tool_call_id
    if message.tool_calls == []:
        rest["tool_calls"] = []
    return {"role": message.role, "parts": parts, **names, **rest}


def _asked(span: Span, place: str) -> Asked:
    attributes = span.attributes
    instructions = json_attribute(attributes, "gen_ai.system_instructions", place)
    messages = [{"role": "system", "content": _texts(objects(instructions))}] if instructions else []
    messages += [_openai(message, place) for message in objects(json_attribute(attributes, INPUT, place))]
    outputs = objects(json_attribute(attributes, OUTPUT, place))
    answers = [(_openai(message, place), str(message.get("finish_reason") or "")) for message in outputs]
    counts = {name: attributes[key] for name, key in USAGE.items() if type(attributes.get(key)) is int}
    own = attributes.get(OWN)
    known = bool(counts) or (isinstance(own, str) and "usage_known" in own)
    if any(not 0 <= count < 1 << 48 for count in counts.values()):
        raise FormatError(place, "gen_ai.usage: must be counts")
    fields: dict[str, Any] = {
        "model": str(attributes.get("gen_ai.request.model", "")),
        "id": str(attributes.get("gen_ai.response.id", "")),
        "usage": Usage(**counts) if known else None,
    }
    if own is None:
        fields |= {"sent": span.start, "ended": span.end, "status": 200}
        numbers = {name: attributes.get(key) for name, key in PARAMETERS.items()}
        fields["parameters"] = {name: number for name, number in numbers.items() if isinstance(number, int | float)}
    first, finish = answers[0] if answers else (None, "")
    return Asked(messages, first, finish, answers[1:], fields)


def _openai(message: dict[str, Any], place: str) -> Message:
    parts = objects(message.get("parts"))
    responses = [part for part in parts if part.get("type") == "tool_call_response"]
    members: Message = {"role": str(message.get("role", "")), "content": _texts(parts)}
    if responses:
        members["content"] = _plain(responses[0].get("response"))
        members["tool_call_id"] = responses[0].get("id")
    reasoning = [str(part.get("content", "")) for part in parts if part.get("type") == "reasoning"]
    members |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    calls = [part for part in parts if part.get("type") == "tool_call"]
    if calls:
        members["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": _plain(call.get("arguments"))},
            }
            for call in calls
        ]
    return members | {name: value for name, value in message.items() if name not in ("role", "parts", "finish_reason")}


def _texts(parts: list[dict[str, Any]]) -> str | None:
    texts = [str(part.get("content", "")) for part in parts if part.get("type") == "text"]
    return "".join(texts) if texts else None


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) or value is None else orjson.dumps(value).decode()

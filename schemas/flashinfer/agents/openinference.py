"""OpenInference's spans (Phoenix), in OTLP's JSON: one span of kind LLM a turn, messages as numbered attributes.

    llm.input_messages.0.message.role, llm.output_messages.0.message.tool_calls.0.tool_call.function.name, …

Source: openinference-semantic-conventions 0.1.42. What they have no name for is in `kcap.turn`, as JSON.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.flashinfer.agents import NO_TEXT, TURN, AgentTurns, Asked, Form, form, has_text, openai_message
from kcap.schemas.flashinfer.agents.common.own import own_fields, whole_turns
from kcap.schemas.flashinfer.agents.common.spans import Span, json_attribute, read_spans, reads_spans, write_spans
from kcap.schemas.flashinfer.agents.opentelemetry import read_turn_spans
from kcap.schemas.recording.conversations import Message, function_of
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger

OWN, KIND = "kcap.turn", "openinference.span.kind"
INPUT, OUTPUT = "llm.input_messages", "llm.output_messages"
USAGE = {
    "prompt": "llm.token_count.prompt",
    "generated": "llm.token_count.completion",
    "cached": "llm.token_count.prompt_details.cache_read",
}
NUMBERED = re.compile(r"(\d{1,6})\.message\.(.+)")
CALL = re.compile(r"tool_calls\.(\d{1,6})\.tool_call\.(id|function\.name|function\.arguments)")
CALL_MEMBERS = {"id": "id", "function.name": "name", "function.arguments": "arguments"}
PLAIN = ("role", "content", "name", "tool_call_id")
DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@form("openinference")
class OpenInference(Form):
    def reads(self, document: Any) -> bool:
        return reads_spans(document, KIND)

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        spans = []
        for span in read_spans(parse_json(content, DOCUMENT, place), place):
            if span.attributes.get(KIND) == "LLM":
                spans.append(span)
            else:
                losses["a span that asks no model"] += 1
        return AgentTurns(read_turn_spans(spans, place, OWN, _asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        turns = whole_turns(trace, _why_not, losses)
        for whole in turns:
            if any(message.reasoning_content is not None for message in [*whole.messages, *whole.turn.answers]):
                losses.reduce(TURN, "reasoning", 1)
        return {"spans": write_spans((w.turn.session, w.turn.number, _span(w.turn, w.messages)) for w in turns)}


def _why_not(messages: list[TurnMessage]) -> str:
    if not all(has_text(message) for message in messages):
        return NO_TEXT
    others = any(isinstance(message.content, list) or message.refusal is not None for message in messages)
    return "parts that are no text, or a refusal" if others else ""


def _span(turn: Turn, messages: list[TurnMessage]) -> Span:
    attributes: dict[str, Any] = {
        KIND: "LLM",
        "session.id": str(turn.session),
        "llm.model_name": turn.model,
        "llm.invocation_parameters": orjson.dumps(turn.request or turn.parameters).decode(),
    }
    for prefix, listed in ((INPUT, messages), (OUTPUT, turn.answers)):
        for number, message in enumerate(listed):
            attributes |= {f"{prefix}.{number}.message.{name}": text for name, text in _message(message).items()}
    usage = turn.usage.model_dump(exclude_none=True) if turn.usage else {}
    attributes |= {USAGE[name]: count for name, count in usage.items()}
    own = own_fields(turn) | {"id": turn.id, "finish": [answer.finish for answer in turn.answers]}
    attributes[OWN] = orjson.dumps(own | ({"usage_known": True} if turn.usage else {})).decode()
    return Span(f"chat {turn.model}".strip(), turn.sent, turn.ended, attributes)


def _message(message: TurnMessage) -> dict[str, Any]:
    members = openai_message(message)
    texts = {name: str(members[name]) for name in PLAIN if members.get(name) is not None}
    for number, call in enumerate(message.tool_calls or ()):
        name, arguments = function_of(call)
        for key, value in (("id", call.get("id")), ("function.name", name), ("function.arguments", arguments)):
            if value is not None:
                texts[f"tool_calls.{number}.tool_call.{key}"] = str(value)
    return texts


def _asked(span: Span, place: str) -> Asked:
    attributes = span.attributes
    inputs, outputs = _messages(attributes, INPUT), _messages(attributes, OUTPUT)
    counts = {name: attributes[key] for name, key in USAGE.items() if type(attributes.get(key)) is int}
    if any(not 0 <= count < 1 << 48 for count in counts.values()):
        raise FormatError(place, "llm.token_count: must be counts")
    own = attributes.get(OWN)
    known = bool(counts) or (isinstance(own, str) and "usage_known" in own)
    fields: dict[str, Any] = {"usage": Usage(**counts) if known else None}
    fields |= {"model": str(attributes.get("llm.model_name", ""))}
    if own is None:
        fields |= {"sent": span.start, "ended": span.end, "status": 200}
    told = json_attribute(attributes, OWN, place)
    finish_reasons = told.get("finish") if isinstance(told, dict) else None
    known_reasons = [*(finish_reasons if isinstance(finish_reasons, list) else []), *[""] * len(outputs)]
    answers = [(message, str(reason)) for message, reason in zip(outputs, known_reasons, strict=False)]
    first, finish = answers[0] if answers else (None, "")
    return Asked(inputs, first, finish, answers[1:], fields)


def _messages(attributes: Mapping[str, Any], prefix: str) -> list[Message]:
    """Of attributes that begin with `prefix`, in the order of their numbers."""
    members: dict[int, Message] = defaultdict(dict)
    calls: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, value in attributes.items():
        match = NUMBERED.fullmatch(name.removeprefix(f"{prefix}.")) if name.startswith(f"{prefix}.") else None
        if match is None:
            continue
        number, member = int(match[1]), match[2]
        if member in PLAIN:
            members[number][member] = value
        elif call := CALL.fullmatch(member):
            calls[number][int(call[1])][CALL_MEMBERS[call[2]]] = value
    messages = []
    for number in sorted(members.keys() | calls.keys()):
        message = {"role": "", "content": None, **members[number]}
        of_message = [call for _, call in sorted(calls[number].items())]
        messages.append(message | ({"tool_calls": [_call(call) for call in of_message]} if of_message else {}))
    return messages


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call[name] for name in ("name", "arguments") if name in call}
    return {"id": call.get("id"), "type": "function", "function": function}

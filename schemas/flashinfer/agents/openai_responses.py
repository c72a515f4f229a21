"""OpenAI's Responses API: a request with its response a line, input and output as lists of typed items.

    {"request": {"model": "m", "input": [items…]}, "response": {"id": "resp_1", "output": [items…], "usage": {…}}}

A message with text and tool calls is several items here, and one again when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Asked,
    Form,
    answer_of,
    form,
    json_lines,
    link,
    openai_message,
    read_json_lines,
    unheld,
)
from kcap.schemas.flashinfer.agents.common.own import WholeTurn, whole_turns, why_no_chat
from kcap.schemas.flashinfer.openai.responses import PARAMETERS, item_messages, request_messages
from kcap.schemas.recording.conversations import Message, function_of, objects, text_of
from kcap.schemas.recording.turns import TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger


@form("openai-responses")
class OpenAIResponses(Form):
    suffix = ".jsonl"

    def reads(self, document: Any) -> bool:
        return isinstance(document, dict) and isinstance(document.get("response"), dict) and "request" in document

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        lines = read_json_lines(content, place)
        return AgentTurns(link(_asked(line, f"{place}:{number}", losses) for number, line in enumerate(lines, 1)))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        turns = whole_turns(trace, why_no_chat, losses)
        for whole in turns:
            _count_losses(whole, losses)
        return {"responses": json_lines(_line(whole) for whole in turns)}


def _count_losses(whole: WholeTurn, losses: LossLedger) -> None:
    turn, messages = whole.turn, [*whole.messages, *whole.turn.answers]
    if unheld(turn, "id", "model", "usage", "parameters") or set(turn.parameters) - PARAMETERS.keys():
        losses.reduce(TURN, "times, tools and further parameters", 1)
    if len(turn.answers) != 1 or any(answer.finish for answer in turn.answers):
        losses.reduce(TURN, "other answers than one, and why each ended", 1)
    if any(isinstance(m.content, list) or m.refusal is not None or m.name is not None for m in messages):
        losses.reduce(TURN, "parts that are no text, refusals and names", 1)
    if [_plain(message) for message in messages] != item_messages(
        (item for message in messages for item in _items(openai_message(message))), Counter()
    ):
        losses.reduce(TURN, "which texts and tool calls are of one message", 1)


def _plain(message: TurnMessage) -> Message:
    return {name: value for name, value in openai_message(message).items() if name not in ("name", "refusal")}


def _line(whole: WholeTurn) -> dict[str, Any]:
    turn, answer = whole.turn, answer_of(whole.turn)
    items = [item for message in whole.messages for item in _items(openai_message(message))]
    parameters = {key: turn.parameters[name] for name, key in PARAMETERS.items() if name in turn.parameters}
    response: dict[str, Any] = {
        "id": turn.id, "object": "response", "model": turn.model,
        "output": list(_items(openai_message(answer))) if answer else [],
    }  # fmt: skip
    if turn.usage is not None:
        usage = turn.usage
        response["usage"] = {"input_tokens": usage.prompt, "output_tokens": usage.generated}
        response["usage"] |= {} if usage.cached is None else {"input_tokens_details": {"cached_tokens": usage.cached}}
    return {"request": {"model": turn.model, "input": items, **parameters}, "response": response}


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content") is not None:
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        yield {"type": "reasoning", "summary": summary}
    content = message.get("content")
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": text_of(content)}
        return
    calls = objects(message.get("tool_calls"))
    if content is not None or not calls:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        parts = [] if content is None else [{"type": kind, "text": text_of(content)}]
        yield {"type": "message", "role": message["role"], "content": parts}
    for call in calls:
        name, arguments = function_of(call)
        yield {"type": "function_call", "call_id": call.get("id"), "name": name, "arguments": arguments}


def _asked(line: Any, place: str, losses: Counter[str]) -> Asked:
    request, response = (line.get("request"), line.get("response")) if isinstance(line, dict) else (None, None)
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise FormatError(place, "must have a request and a response")
    messages = request_messages(request, losses)
    answers = item_messages(objects(response.get("output")), losses)
    parameters = {name: request[key] for name, key in PARAMETERS.items() if isinstance(request.get(key), int | float)}
    fields: dict[str, Any] = {
        "id": str(response.get("id") or ""), "model": str(request.get("model") or ""), "status": 200,
        "usage": _usage(response.get("usage"), place), "parameters": parameters,
    }  # fmt: skip
    return Asked(messages, answers[0] if answers else None, fields=fields)


def _usage(usage: Any, place: str) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {"prompt": usage.get("input_tokens"), "generated": usage.get("output_tokens"), "cached": cached}
    if any(n is not None and (type(n) is not int or not 0 <= n < 1 << 48) for n in counts.values()):
        raise FormatError(place, "usage: must be counts")
    return Usage(**counts)

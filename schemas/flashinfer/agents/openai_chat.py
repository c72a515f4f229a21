"""Requests to OpenAI's chat API, one a line: what SGLang's benchmark reads as its dataset `openai`.

    {"messages": […], "tools": […], "max_tokens": 64, "answer": {"role": "assistant", …}}

Each line has the whole conversation so far. `answer`, which that benchmark leaves aside, is what the model returned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    NO_TEXT,
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
    texts_of,
)
from kcap.schemas.results.export_loss import LossLedger


@form("openai-chat")
class OpenAIChat(Form):
    suffix = ".jsonl"

    def reads(self, document: Any) -> bool:
        return (
            isinstance(document, dict) and isinstance(document.get("messages"), list) and "session_id" not in document
        )

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        asked = []
        for number, line in enumerate(read_json_lines(content, place), 1):
            messages = line.get("messages") if isinstance(line, dict) else None
            if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
                raise FormatError(f"{place}:{number}", "messages: must be a list of messages, each with a role")
            answer = line.get("answer")
            if answer is not None and not _is_message(answer):
                raise FormatError(f"{place}:{number}", "answer: must be a message")
            asked.append(
                Asked(messages, answer, str(line.get("finish_reason", "")), {"status": 200, **request_fields(line)})
            )
        return AgentTurns(link(asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        lines = []
        for turn in trace.turns:
            messages = texts_of(trace, turn)
            if messages is None:
                losses.lose(TURN, NO_TEXT, 1)
                continue
            if turn.sent or turn.usage or turn.id:
                losses.reduce(TURN, "times, tokens and the engine's name for it", 1)
            line = {
                "messages": messages,
                **(turn.request or {**({"model": turn.model} if turn.model else {}), **turn.parameters}),
            }
            if (answer := answer_of(turn)) is not None:
                line |= {"answer": openai_message(answer)} | ({"finish_reason": answer.finish} if answer.finish else {})
            lines.append(line)
        return {"requests": json_lines(lines)}


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


NOT_REQUEST = ("messages", "answer", "finish_reason")


def request_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Members of a Turn that say how it was asked."""
    request = {name: value for name, value in body.items() if name not in NOT_REQUEST}
    functions = (
        [tool.get("function") for tool in request.get("tools") or () if isinstance(tool, dict)]
        if isinstance(request.get("tools"), list)
        else []
    )
    parameters = {name: value for name, value in request.items() if isinstance(value, int | float) and name != "stream"}
    return {
        "model": str(request.get("model", "")),
        "stream": request.get("stream") is True,
        "parameters": parameters,
        "tools": [str(function.get("name", "")) for function in functions if isinstance(function, dict)],
        "request": request,
    }

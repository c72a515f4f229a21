"""Requests to OpenAI's chat API, one a line: what SGLang's benchmark reads as its dataset `openai`.

    {"messages": […], "tools": […], "max_tokens": 64, "answer": {"role": "assistant", …}}

Each line has the whole conversation so far. `answer`, which that benchmark leaves aside, is what the model returned.
"""

from __future__ import annotations

from collections import Counter
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
    turns_with_texts,
    unheld,
)
from kcap.schemas.recording.conversations import request_members
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
                Asked(
                    messages, answer, str(line.get("finish_reason", "")), fields={"status": 200, **request_fields(line)}
                )
            )
        return AgentTurns(link(asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        lines = []
        for turn, messages in turns_with_texts(trace, trace.turns, losses):
            if unheld(turn, "model", "stream", "parameters", "request", "tools") or len(turn.answers) > 1:
                losses.reduce(TURN, "times, tokens, the engine's name for it, and further answers", 1)
            plain = {"model": turn.model, "stream": turn.stream, **turn.parameters}
            request = turn.request or {name: value for name, value in plain.items() if value not in ("", False)}
            if request_fields(request) != {name: getattr(turn, name) for name in FIELDS}:
                losses.reduce(TURN, "tools and parameters", 1)
            line = {"messages": messages, **request}
            if (answer := answer_of(turn)) is not None:
                line |= {"answer": openai_message(answer)} | ({"finish_reason": answer.finish} if answer.finish else {})
            lines.append(line)
        return {"requests": json_lines(lines)}


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


NOT_REQUEST = ("messages", "answer", "finish_reason")
FIELDS = ("model", "stream", "parameters", "tools", "request")


def request_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Members of a Turn that say how it was asked; `request` where the others do not say it all."""
    request = {name: value for name, value in body.items() if name not in NOT_REQUEST}
    members = request_members(request)
    is_plain = request.keys() <= {"model", "stream", *members["parameters"]} and isinstance(
        request.get("model", ""), str
    )
    return {**members, "request": {} if is_plain else request}

"""ShareGPT's conversations, which vLLM's and SGLang's benchmarks read: a list of whole conversations.

    [{"id": "0", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}]

Those benchmarks send the first two messages alone. A conversation is written once, as its last turn left it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.flashinfer.agents import (
    NO_TEXT,
    TURN,
    AgentTurns,
    Asked,
    Form,
    answer_of,
    form,
    link,
    openai_message,
    texts_of,
)
from kcap.schemas.recording.turns import Turn
from kcap.schemas.results.export_loss import LossLedger

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
ROLES |= {"bard": "assistant", "bing": "assistant", "system": "system", "tool": "tool"}
WRITTEN = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
DOCUMENT: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(list[dict[str, Any]])


@form("sharegpt")
class ShareGPT(Form):
    def reads(self, document: Any) -> bool:
        first = document[0] if isinstance(document, list) and document else None
        return isinstance(first, dict) and (
            "conversations" in first or ("conversation" in first and "model" not in first)
        )

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        asked: list[Asked] = []
        document: list[dict[str, Any]] = parse_json(content, DOCUMENT, place)
        for number, item in enumerate(document):
            messages: list[dict[str, Any]] = []
            texts = item.get("conversations", item.get("conversation"))
            if not isinstance(texts, list):
                raise FormatError(f"{place}: {number}", "conversations: must be a list")
            for entry in texts:
                message = _message(entry, f"{place}: {number}")
                if message["role"] == "assistant" and messages:
                    asked.append(Asked(list(messages), message, fields={"status": 200}))
                messages.append(message)
        return AgentTurns(link(asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        gone_on = {turn.parent for turn in trace.turns}
        items = []
        for turn in trace.turns:
            messages = texts_of(trace, turn)
            if messages is None:
                losses.lose(TURN, NO_TEXT, 1)
                continue
            _count_losses(turn, losses)
            answer = answer_of(turn)
            if turn.number not in gone_on:
                every = [*messages, *([openai_message(answer)] if answer else [])]
                items.append({"id": str(turn.session), "conversations": [_entry(message) for message in every]})
        return {"conversations": orjson.dumps(items, option=orjson.OPT_INDENT_2) + b"\n"}


def _message(entry: Any, place: str) -> dict[str, Any]:
    role = ROLES.get(str(entry.get("from"))) if isinstance(entry, dict) else None
    if role is None or not isinstance(entry.get("value"), str):
        raise FormatError(place, f"each message has `from` (one of {', '.join(ROLES)}) and a text as `value`")
    return {"role": role, "content": entry["value"]}


def _entry(message: dict[str, Any]) -> dict[str, str]:
    content = message.get("content")
    texts = [part.get("text", "") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return {
        "from": WRITTEN.get(message["role"], message["role"]),
        "value": content if isinstance(content, str) else "".join(texts),
    }


def _count_losses(turn: Turn, losses: LossLedger) -> None:
    if turn.sent or turn.usage or turn.parameters or turn.request or turn.id:
        losses.reduce(TURN, "times, tokens and parameters", 1)
    if any(message.tool_calls or message.tool_call_id or message.parts for message in [*turn.messages, *turn.answers]):
        losses.reduce(TURN, "tool calls and parts that are no text", 1)

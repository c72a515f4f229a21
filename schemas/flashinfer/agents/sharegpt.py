"""ShareGPT's conversations, which vLLM's and SGLang's benchmarks read: a list of whole conversations.

    [{"id": "0", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}]

Those benchmarks send the first two messages alone. A conversation is written once, as its last turn left it,
and as one line of turns; a turn whose answer the next leaves out, by itself. Each that is read is a session.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Asked,
    Form,
    answer_of,
    form,
    link,
    openai_message,
    turns_with_texts,
    unheld,
)
from kcap.schemas.flashinfer.agents.common.deltas import turns_in_line
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
            begins = True
            texts = item.get("conversations", item.get("conversation"))
            if not isinstance(texts, list):
                raise FormatError(f"{place}: {number}", "conversations: must be a list")
            for entry in texts:
                message = _message(entry, f"{place}: {number}")
                if message["role"] == "assistant" and messages:
                    asked.append(Asked(list(messages), message, fields={"status": 200}, begins=begins))
                    begins = False
                messages.append(message)
        return AgentTurns(link(asked))

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        kept = list(turns_with_texts(trace, turns_in_line(trace, losses), losses))
        whole = {turn.number: len(messages) + bool(turn.answers) for turn, messages in kept}
        gone_on = {of for turn, _ in kept if (of := turn.parent) is not None and turn.shared == whole.get(of)}
        items = []
        for turn, messages in kept:
            if turn.number in gone_on and not turn.answers:
                losses.reduce(TURN, "that it has no answer", 1)
            if turn.parent is not None and turn.parent not in gone_on:
                losses.reduce(TURN, "that it goes on without the answer before it", 1)
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
    if unheld(turn) or any(answer.finish for answer in turn.answers) or len(turn.answers) != 1:
        losses.reduce(TURN, "times, tokens, parameters, how it ended, and other answers than one", 1)
    told = [openai_message(message) for message in [*turn.messages, *turn.answers]]
    if any(message.keys() - {"role", "content"} or not isinstance(message["content"], str) for message in told):
        losses.reduce(TURN, "tool calls, reasoning and parts that are no text", 1)

"""SGLang's `agentic-trace`, of its `bench_serving`: conversations as what each turn adds, without the answers.

    {"metadata": {}, "conversations": [[{"messages": [new messages, not the model's], "prompt_tokens": 412}, …], …]}

The benchmark threads the live answers in. Source: SGLang 0.5.23, `benchmark/datasets`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import orjson
from pydantic import TypeAdapter

from kcap.schemas.files.jsonfile import parse_json
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Form,
    describe,
    form,
    openai_message,
    unheld,
    whole,
)
from kcap.schemas.flashinfer.agents.common.deltas import new_messages, turns_in_line
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger

DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@form("sglang-agentic")
class SGLangAgentic(Form):
    def reads(self, document: Any) -> bool:
        return isinstance(document, dict) and isinstance(document.get("conversations"), list) and "metadata" in document

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        turns: list[Turn] = []
        conversations = parse_json(content, DOCUMENT, place).get("conversations")
        for session, entries in enumerate(conversations if isinstance(conversations, list) else []):
            shared = 0
            for place_in_session, entry in enumerate(entries if isinstance(entries, list) else [None]):
                where = f"{place}: conversations.{session}.{place_in_session}"
                messages = new_messages(entry, where)
                tokens = entry.get("prompt_tokens")
                usage = None if tokens is None else Usage(prompt=whole(tokens, f"{where}.prompt_tokens"))
                links: dict[str, Any] = {"parent": len(turns) - 1, "shared": shared} if place_in_session else {}
                new = [TurnMessage(**describe(message)) for message in messages]
                turns.append(
                    Turn(
                        number=len(turns),
                        session=session,
                        turn=place_in_session,
                        status=200,
                        messages=new,
                        usage=usage,
                        **links,
                    )
                )
                shared += len(new) + 1
        return AgentTurns(turns)

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        conversations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for turn in turns_in_line(trace, losses):
            if turn.answers or unheld(turn, "usage"):
                losses.reduce(TURN, "answers, times, tools and parameters", 1)
            if turn.usage is not None and (turn.usage.generated is not None or turn.usage.cached is not None):
                losses.reduce(TURN, "the tokens that it generated and found", 1)
            entry: dict[str, Any] = {"messages": [openai_message(message) for message in turn.messages]}
            if turn.usage is not None and turn.usage.prompt is not None:
                entry["prompt_tokens"] = turn.usage.prompt
            conversations[turn.session].append(entry)
        document = {"metadata": {}, "conversations": list(conversations.values())}
        return {"trace": orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"}

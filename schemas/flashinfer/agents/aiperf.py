"""AIPerf's `mooncake_trace` with messages: what each turn of a session adds, one a line.

    {"session_id": "0", "messages": [new messages], "message_mode": "delta", "delay": 420, "output_length": 52}

Source: AIPerf's documentation of its trace replay. `timestamp` (milliseconds, of a first turn) and `delay` (after the
answer before) give the times; the live answers are threaded in by AIPerf.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Form,
    describe,
    form,
    json_lines,
    openai_message,
    read_json_lines,
    unheld,
    whole,
)
from kcap.schemas.flashinfer.agents.common.deltas import new_messages, turns_in_line
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger


@form("aiperf")
class AIPerf(Form):
    suffix = ".jsonl"

    def reads(self, document: Any) -> bool:
        return isinstance(document, dict) and "session_id" in document and isinstance(document.get("messages"), list)

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        turns: list[Turn] = []
        last: dict[str, Turn] = {}
        for number, line in enumerate(read_json_lines(content, place)):
            where = f"{place}:{number + 1}"
            messages = new_messages(line, where)
            if line.get("message_mode", "delta") != "delta":
                losses["message_mode: whole histories are read as what a turn adds"] += 1
            turn = _turn(number, line, messages, last.get(str(line.get("session_id"))), len(last), turns, where)
            last[str(line.get("session_id"))] = turn
            turns.append(turn)
        return AgentTurns(turns)

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        lines = []
        start = min((turn.sent for turn in trace.turns), default=0.0)
        for turn in turns_in_line(trace, losses):
            if turn.answers or unheld(turn, "sent", "ended", "usage") or turn.ended != turn.sent:
                losses.reduce(TURN, "answers, their times, tools and parameters", 1)
            if turn.usage is not None and turn.usage.cached is not None:
                losses.reduce(TURN, "what it found in the prefix cache", 1)
            lines.append(_line(trace, turn, start))
        return {"trace": json_lines(lines)}


def _line(trace: AgentTurns, turn: Turn, start: float) -> dict[str, Any]:
    line: dict[str, Any] = {"session_id": str(turn.session), "message_mode": "delta"}
    if turn.parent is None:
        line["timestamp"] = round((turn.sent - start) * 1e3, 3)
    else:
        line["delay"] = round(max(0.0, turn.sent - trace.turns[turn.parent].ended) * 1e3, 3)
    line["messages"] = [openai_message(message) for message in turn.messages]
    if turn.usage is not None:
        counts = {"input_length": turn.usage.prompt, "output_length": turn.usage.generated}
        line |= {name: count for name, count in counts.items() if count is not None}
    return line


def _turn(
    number: int,
    line: dict[str, Any],
    messages: list[Any],
    parent: Turn | None,
    session: int,
    turns: list[Turn],
    where: str,
) -> Turn:
    counts = {"prompt": line.get("input_length"), "generated": line.get("output_length")}
    known = {name: whole(count, f"{where}: length") for name, count in counts.items() if count is not None}
    links: dict[str, Any] = {"session": session}
    time = line.get("timestamp" if parent is None else "delay", 0)
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < 1e15:
        raise FormatError(where, "timestamp, delay: must be milliseconds, from 0")
    sent = time / 1e3
    if parent is not None:
        shared = parent.shared + len(parent.messages) + 1
        links = {"session": parent.session, "turn": parent.turn + 1, "parent": parent.number, "shared": shared}
        sent += parent.ended or parent.sent
    described = [TurnMessage(**describe(message)) for message in messages]
    usage = Usage(**known) if known else None
    return Turn(number=number, **links, status=200, sent=sent, ended=sent, messages=described, usage=usage)

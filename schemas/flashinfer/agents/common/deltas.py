"""Forms whose lines have what each turn adds to its session, which must be one line of turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import NO_TEXT, TURN, AgentTurns, has_text
from kcap.schemas.recording.conversations import Message
from kcap.schemas.recording.turns import Turn
from kcap.schemas.results.export_loss import LossLedger


def new_messages(entry: Any, place: str) -> list[Message]:
    """The messages that a turn adds; FormatError where `entry` has none."""
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise FormatError(place, "messages: must be a list of messages, each with a role")
    return messages


def turns_in_line(trace: AgentTurns, losses: LossLedger) -> Iterator[Turn]:
    """The turns whose texts are known and that go on with the latest of their session; `losses` counts the others."""
    left_out, latest = set[int](), dict[int, int]()  # the latest turn of a session
    for turn in trace.turns:
        texts = all(has_text(message) and message.role != "prompt" for message in turn.messages)
        if turn.parent in left_out or not texts or latest.get(turn.session) != turn.parent:
            left_out.add(turn.number)
            losses.lose(TURN, NO_TEXT if not texts else "its session is no line of turns", 1)
            continue
        latest[turn.session] = turn.number
        yield turn

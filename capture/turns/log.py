"""The turns of a session's servers: which conversation each goes on, and the file that they are written to.

Only what is new in a conversation is written.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Session, failure_line
from kcap.capture.turns.exchange import (
    Exchange,
    describe_answer,
    describe_request,
    engine_name,
    error_kind,
    read_answer,
    read_request,
)
from kcap.errors import FormatError
from kcap.schemas.recording.conversations import Conversations, objects

TURNS, NOTES = "agent_trace.turns", "agent_trace.notes"  # in the session's directory


class TurnLog:
    """Writes a line for each exchange that has ended."""

    def __init__(self, session: Session) -> None:
        self._path = Path(session.directory) / TURNS
        self._keep_text = session.keep_text
        self._conversations = Conversations(session.hash_key)
        self._number = 0

    def add(self, exchange: Exchange) -> None:
        """OSError where the disk is full. An exchange that cannot be told is a turn that says so."""
        turn = _times(exchange, self._number)
        try:
            line = orjson.dumps({**turn, **self._members(exchange)})
        except Exception as error:
            place, _ = self._conversations.begin(self._number, [])
            line = orjson.dumps({**turn, "session": place.session, "turn": place.turn, "unread": type(error).__name__})
        self._number += 1
        with self._path.open("ab") as file:
            file.write(line + b"\n")

    def _members(self, exchange: Exchange) -> dict[str, Any]:
        """Members of a Turn beside its times."""
        number, turn = self._number, dict[str, Any]()
        asked = None
        try:
            if exchange.dropped:
                raise FormatError("request", "too many bytes at once: not kept")
            asked = read_request(exchange)
        except FormatError as error:
            turn["unread"] = error.reason
        messages = asked.messages if asked else []
        place, parent = self._conversations.begin(number, messages)
        turn |= {"session": place.session, "turn": place.turn}
        turn |= {"parent": parent.number, "shared": parent.messages} if parent else {}
        if asked is None:
            return turn
        turn |= {"unread": f"not told: {', '.join(asked.untold)}"} if asked.untold else {}
        try:
            turn |= describe_request(asked, messages[parent.messages if parent else 0 :], self._keep_text)
            if exchange.status == 200:
                turn["id"] = engine_name(exchange)
                answer = read_answer(exchange)
                turn |= describe_answer(answer, self._keep_text)
                choices = objects(answer.get("choices"))
                self._conversations.remember(place, messages, choices[0]["message"] if choices else None)
            elif exchange.status is not None:
                turn["error"] = error_kind(exchange)
        except (FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
            turn["unread"] = error.reason if isinstance(error, FormatError) else type(error).__name__
        return turn


def _times(exchange: Exchange, number: int) -> dict[str, Any]:
    turn = {"t": "turn", "number": number, "api": exchange.api, "sent": exchange.sent, "ended": exchange.ended}
    turn |= {"first": exchange.first} if exchange.first is not None else {}
    turn |= {"status": exchange.status} if exchange.status is not None else {}
    return turn if exchange.complete else {**turn, "aborted": True}


def read_lines(directory: Path) -> list[bytes]:
    """A session's lines; the last one may be torn."""
    path = directory / TURNS
    return path.read_bytes().splitlines() if path.exists() else []


def note_failure(session: Session, error: Exception) -> None:
    """Say in the Recording that no further turn is written; the first reason that can be written counts."""
    with contextlib.suppress(OSError), (Path(session.directory) / NOTES).open("ab") as file:
        if not file.tell():
            file.write(orjson.dumps(failure_line("agent_trace", error)) + b"\n")

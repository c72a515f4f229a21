"""The turns of a server's process: which conversation each goes on, and the file that they are written to.

A turn goes on where another's messages, with its answer, are the first of its own. That is told by a keyed hash of
them, so that no text is kept and no hash says anything outside this session. Only what is new is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Session
from kcap.capture.turns.exchange import (
    Exchange,
    canonical,
    describe_answer,
    describe_request,
    engine_name,
    error_kind,
    objects,
    read_answer,
    read_request,
)
from kcap.errors import FormatError

TURNS_ENDING = ".turns"
MOST_CONVERSATIONS = 1 << 17  # that may be gone on with; the ones used last are kept


@dataclass(frozen=True)
class _Place:
    """Where a conversation stands after a turn: `messages` so far."""

    number: int
    session: int
    turn: int
    messages: int


class TurnLog:
    """Writes a line for each exchange that has ended."""

    def __init__(self, session: Session) -> None:
        stem = session.shard()
        self._path = stem.with_name(stem.name + TURNS_ENDING)
        self._key = session.hash_key.encode()[:64]
        self._keep_text = session.keep_text
        self._places: OrderedDict[bytes, _Place] = OrderedDict()
        self._number = self._sessions = 0

    def add(self, exchange: Exchange) -> None:
        """OSError where the disk is full."""
        with self._path.open("ab") as file:
            file.write(orjson.dumps({"t": "turn", **self._members(exchange)}) + b"\n")

    def failed(self, error: Exception) -> None:
        """Say in the Recording that no further turn is written."""
        line = {"t": "tap", "name": "agent_trace", "status": "failed", "detail": f"{type(error).__name__}: {error}"}
        notes = self._path.with_name(self._path.name.removesuffix(TURNS_ENDING) + ".notes")
        with contextlib.suppress(OSError), notes.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")

    def _members(self, exchange: Exchange) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        turn: dict[str, Any] = {"number": number, "api": exchange.api, "sent": exchange.sent, "ended": exchange.ended}
        turn |= {"first": exchange.first} if exchange.first is not None else {}
        turn |= {"status": exchange.status} if exchange.status is not None else {}
        turn |= {} if exchange.complete else {"aborted": True}
        place = _Place(number, self._sessions, 0, 0)
        messages: list[dict[str, Any]] = []
        try:
            if exchange.dropped:
                raise FormatError("request", "too many bytes at once: not kept")
            asked = read_request(exchange)
            messages = asked.messages
            place = self._place(number, messages)
            turn |= describe_request(asked, messages[place.messages :], self._keep_text)
            if exchange.status == 200:
                turn["id"] = engine_name(exchange)
                answer = read_answer(exchange)
                turn |= describe_answer(answer, self._keep_text)
                self._remember(messages, answer, place)
            elif exchange.status is not None:
                turn["error"] = error_kind(exchange)
        except (FormatError, AttributeError, KeyError, TypeError, ValueError) as error:
            turn["unread"] = error.reason if isinstance(error, FormatError) else type(error).__name__
        self._sessions += place.session == self._sessions
        parent = {} if place.number == number else {"parent": place.number, "shared": place.messages}
        return {**turn, "session": place.session, "turn": place.turn, **parent}

    def _place(self, number: int, messages: Sequence[dict[str, Any]]) -> _Place:
        """The place of a turn: that of the longest conversation which it goes on, itself where there is none.

        A turn that sends the very messages of another, and no more, is a second try of that one: it goes on nothing.
        """
        best = _Place(number, self._sessions, 0, 0)
        for digest, _ in zip(self._digests(messages), range(len(messages) - 1), strict=False):
            if (place := self._places.get(digest)) is not None:
                self._places.move_to_end(digest)
                best = _Place(place.number, place.session, place.turn + 1, place.messages)
        return best

    def _digests(self, messages: Sequence[dict[str, Any]]) -> list[bytes]:
        """Of the first message, of the first two, and so on."""
        hashed = hashlib.blake2b(key=self._key, digest_size=16)
        digests = []
        for message in messages:
            hashed.update(canonical(message) + b"\n")
            digests.append(hashed.digest())
        return digests

    def _remember(self, messages: list[dict[str, Any]], answer: dict[str, Any], place: _Place) -> None:
        """That this turn may be gone on with: after its answer, or after its messages with another answer."""
        choices = objects(answer.get("choices"))
        if not messages or not choices:
            return
        answered = [*messages, {"role": "assistant", **choices[0]["message"]}]
        for digest, known in zip(self._digests(answered)[-2:], (len(messages), len(answered)), strict=True):
            self._places[digest] = _Place(self._number - 1, place.session, place.turn, known)
            self._places.move_to_end(digest)
        while len(self._places) > MOST_CONVERSATIONS:
            self._places.popitem(last=False)


def read_lines(directory: Path) -> list[tuple[str, list[bytes]]]:
    """The lines of every process of a session, by its shard's name; a process's torn last line among them."""
    paths = sorted(directory.glob(f"*{TURNS_ENDING}"))
    return [(os.path.splitext(path.name)[0], path.read_bytes().splitlines()) for path in paths]

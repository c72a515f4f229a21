"""The turns of a session's servers, in the order in which they were sent, each with the requests that it ran as."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import orjson
from pydantic import ValidationError

from kcap.capture.turns.log import read_lines
from kcap.schemas.recording.recording import Request
from kcap.schemas.recording.turns import Turn

CHILD = re.compile(r"^\d+_")  # before the name of one of several answers to one request
PART = re.compile(
    r"_\d+$"
)  # after that of one of the requests that a response ran as, tools of the server's between them


def merge_turns(directory: Path, requests: Sequence[Request]) -> tuple[list[Turn], list[str]]:
    """The turns that a session left, and notes on what could not be read."""
    turns = list[Turn]()
    damaged = 0
    for line in read_lines(directory):
        try:
            turns.append(Turn.model_validate(orjson.loads(line)))
        except (orjson.JSONDecodeError, ValidationError):
            damaged += 1
    turns.sort(key=lambda turn: (turn.sent, turn.number))
    notes = [f"agent trace: {damaged} torn lines left out"] if damaged else []
    return _numbered(turns, by_turn(requests, {turn.id for turn in turns})), notes


def _numbered(turns: Sequence[Turn], requests: dict[str, list[int]]) -> list[Turn]:
    """With numbers in the order in which they were sent, instead of that in which they ended."""
    numbers = {turn.number: number for number, turn in enumerate(turns)}
    sessions: dict[int, int] = {}
    numbered = []
    for number, turn in enumerate(turns):
        session = sessions.setdefault(turn.session, len(sessions))
        parent = None if turn.parent is None else numbers.get(turn.parent)
        links = {"number": number, "session": session, "parent": parent, "requests": requests.get(turn.id, [])}
        numbered.append(turn.model_copy(update=links))
    return numbered


def by_turn(requests: Iterable[Request], turns: Collection[str]) -> dict[str, list[int]]:
    """Places of requests by the name that the engine answers with, which is the turn's: its own may begin with the
    number of an answer, and end with that of a prompt or of a part, and with random digits. Of several turns it is of
    the one with the longest name.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        name = CHILD.sub("", request.id)
        while name:
            turn = next((known for known in (name, PART.sub("", name)) if known in turns), None)
            if turn is not None:
                places[turn].append(place)
                break
            name = name.rpartition("-")[0]
    return places

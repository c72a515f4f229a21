"""The agent trace of a report: sessions of turns, with what `kcap show --by session` and `turn` say of them.

Messages, and the kernels of a turn's steps, are details, which a browser unpacks only when somebody asks for a turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kcap.schemas.recording.conversations import function_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.turns import Turn, TurnMessage, programs_by, read_turns, tools_of
from kcap.show.gain import CallTime
from kcap.show.requests import RequestRow, request_summaries, time_notes, unnamed_note

DIGITS = 6  # of seconds
MOST_TEXT = 20_000  # characters of one text in a report
MOST_TEXTS = 20_000_000  # of all texts
TEXTS = ("content", "reasoning_content", "refusal")
NO_REQUESTS = "the engine's steps name no requests: tokens computed, steps and times of a turn are not known"
NO_TIMES = "times are not known: families of kernels need PyTorch where the report is made"
LEFT_OUT = "not shown: the texts of a report have at most {:,} characters"


@dataclass(frozen=True)
class TurnEntry:
    """A turn. `row`: of `kcap show --json --by turn`; `sent`, `first`, `ended`: seconds since the trace's first turn.

    `sound`: it was answered, and the client read the answer to its end.
    """

    row: dict[str, Any]
    turn: int
    sent: float
    first: float | None
    ended: float
    sound: bool
    tools: list[str]


@dataclass(frozen=True)
class SessionEntry:
    """A conversation. `row`: of `kcap show --json --by session`."""

    row: dict[str, Any]
    turns: list[TurnEntry]


@dataclass(frozen=True)
class AgentTrace:
    """The sessions, the costliest first. `total`, `families`: of all requests; `notes`: what the times are."""

    sessions: list[SessionEntry]
    total: dict[str, Any]
    families: list[str]
    timed: bool
    notes: list[str]


@dataclass(frozen=True)
class MessageText:
    """What is told of a message: its size and kind in words and, if they were kept, its texts by what they are."""

    role: str
    facts: str
    texts: list[tuple[str, str]]


@dataclass(frozen=True)
class TurnText:
    """What is shown of one turn alone. `shared`: messages that are those of the conversation of the turn `parent`.

    `programs`: which Programs its listed steps ran, by id, and how many steps each.
    """

    facts: list[tuple[str, str]]
    parent: int | None
    shared: int
    messages: list[MessageText]
    answers: list[MessageText]
    programs: list[tuple[int, int]]


@dataclass(frozen=True)
class TurnDetails:
    """By the turn's number; `programs`: by id the Calls of one step that ran it, each with how often it did."""

    turns: dict[int, TurnText]
    programs: dict[int, list[tuple[int, int]]]


def agent_trace(recording: Recording, times: Mapping[int, CallTime], source: str) -> AgentTrace | None:
    """The trace beside the Recording, with `times` (from `source`) shared out; None where it has none."""
    turns = read_turns(recording.path)
    if not turns:
        return None
    start = min(turn.sent for turn in turns)
    if recording.requests:
        by_turn, by_session = request_summaries(recording, times, source, ("turn", "session"))
        rows, sessions = _by_number(by_turn.rows), by_session.rows
        total, families, timed = by_turn.total, by_turn.families, by_turn.times is not None
        notes = [unnamed_note(by_turn), *(list(time_notes(by_turn)) or [NO_TIMES])]
    else:
        numbers = sorted({turn.session for turn in turns})
        rows, sessions = {}, [RequestRow(str(number), number) for number in numbers]
        total, families, timed, notes = RequestRow(""), [], False, [NO_REQUESTS]
    of_session: dict[int, list[TurnEntry]] = defaultdict(list)
    for turn in turns:
        row = rows.get(turn.number) or RequestRow(f"{turn.session}.{turn.turn}", turn.number)
        of_session[turn.session].append(_entry(turn, row, start))
    entries = [SessionEntry(row.as_json(), of_session[row.number or 0]) for row in sessions]
    return AgentTrace(entries, total.as_json(), families, timed, [note for note in notes if note])


def _by_number(rows: Iterable[RequestRow]) -> dict[int, RequestRow]:
    return {row.number: row for row in rows if row.number is not None}


def _entry(turn: Turn, row: RequestRow, start: float) -> TurnEntry:
    return TurnEntry(
        row=row.as_json(),
        turn=turn.turn,
        sent=round(turn.sent - start, DIGITS),
        first=None if turn.first is None else round(turn.first - start, DIGITS),
        ended=round(max(turn.ended, turn.sent) - start, DIGITS),
        sound=turn.status == 200 and not turn.aborted,
        tools=tools_of(turn),
    )


def turn_details(recording: Recording) -> TurnDetails:
    """What a page shows of each turn alone."""
    turns, texts = read_turns(recording.path), _Texts()
    turns_of: dict[int, list[int]] = defaultdict(list)
    for turn in turns:
        for request in turn.requests:
            turns_of[request].append(turn.number)
    ran, names = programs_by(recording.steps, turns_of), [request.id for request in recording.requests]
    shown = {turn.number: _turn_text(turn, names, ran[turn.number], texts) for turn in turns}
    return TurnDetails(shown, _calls(recording, {program for of_turn in ran.values() for program in of_turn}))


def _calls(recording: Recording, programs: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
    """Of each Program the kernels that do work."""
    counts = {
        number: Counter(
            call.id for call in recording.ran(recording.program(number)) if call.kind == "kernel" and call.work
        )
        for number in sorted(programs)
    }
    return {number: list(calls.items()) for number, calls in counts.items()}


class _Texts:
    """Cuts texts to what a report may hold."""

    def __init__(self) -> None:
        self._left = MOST_TEXTS

    def __call__(self, text: str) -> str:
        if self._left <= 0:
            return LEFT_OUT.format(MOST_TEXTS)
        shown, more = text[:MOST_TEXT], len(text) - MOST_TEXT
        self._left -= len(shown)
        return shown + (f"\n… {more:,} more characters" if more > 0 else "")


def _turn_text(turn: Turn, names: Sequence[str], programs: Counter[int], texts: _Texts) -> TurnText:
    return TurnText(
        facts=list(_facts(turn, names)),
        parent=turn.parent,
        shared=turn.shared,
        messages=[_message(message, texts) for message in turn.messages],
        answers=[_message(answer, texts, answer.finish) for answer in turn.answers],
        programs=sorted(programs.items()),
    )


def _facts(turn: Turn, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`names`: of all requests."""
    yield "API", f"{turn.api}{', streamed' if turn.stream else ''}"
    yield "model", turn.model
    yield "status", f"{'' if turn.status is None else turn.status} {turn.error}".strip()
    yield "parameters", ", ".join(f"{name}={value}" for name, value in turn.parameters.items())
    yield "tools that it may call", ", ".join(turn.tools)
    if turn.usage is not None:
        usage = {name: getattr(turn.usage, name) for name in ("prompt", "cached", "generated")}
        known = ", ".join(f"{count:,} {name}" for name, count in usage.items() if count is not None)
        yield "tokens that the engine told", known
    yield "requests", ", ".join(names[place] for place in turn.requests if place < len(names))
    yield "not read", turn.unread


def _message(message: TurnMessage, texts: _Texts, finish: str = "") -> MessageText:
    facts = [f"{message.chars:,} characters"]
    if message.reasoning_chars:
        facts.append(f"{message.reasoning_chars:,} of reasoning")
    if message.tools:
        facts.append(f"calls {', '.join(message.tools)}")
    facts += [f"{count:,} {kind}" for kind, count in message.parts.items()]
    facts += [text for text in (message.name, message.tool_call_id) if text]
    if finish:
        facts.append(f"finish: {finish}")
    shown = [(name, texts(_as_text(value))) for name in TEXTS if (value := getattr(message, name)) not in (None, "")]
    shown += [("tool call", texts(_tool_call(call))) for call in message.tool_calls or ()]
    return MessageText(message.role, ", ".join(facts), shown)


def _tool_call(call: dict[str, Any]) -> str:
    name, arguments = function_of(call)
    return _as_text(call) if name is None else f"{_as_text(name)} {_as_text(arguments)}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()

"""What `kcap show --by request`, `turn` or `session` says: tokens, steps, and what of the GPU's time each had.

A turn is what an agent asked of the server, with the requests that it ran as; a session is a conversation of turns.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kcap.errors import CallError
from kcap.schemas.recording.recording import Recording, Request
from kcap.schemas.recording.turns import Turn, kind_of, read_turns
from kcap.schemas.validation.report import printable
from kcap.show.console import GAP
from kcap.show.estimate import Rates, estimated_times, typical_rates
from kcap.show.gain import CallTime, profiled_times
from kcap.show.request_times import (
    BY_CONTEXT,
    RULE,
    RequestTime,
    RequestTimes,
    request_times,
    step_tokens,
    unnamed_tokens,
)

TOKENS = ("prompt", "cached", "computed", "again", "missed", "generated", "steps")
MOST_FAMILIES = 4  # columns
LEAST_NAME, MOST_NAME = 20, 56  # columns of a terminal


@dataclass(slots=True)
class RequestRow:
    """A request, or several together. Tokens and steps as in Request; microseconds as in RequestTime.

    `number`: the line of a request in requests.jsonl, of a turn in turns.jsonl, a session's number; None of a sum.
    `missed`: tokens of whole blocks at a prompt's beginning that an earlier prompt had, too, and that the prefix cache
    did not have (any more).
    """

    name: str
    number: int | None = None
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    computed: int = 0
    decoded: int = 0
    again: int = 0
    missed: int = 0
    generated: int = 0
    steps: int = 0
    steps_us: float = 0.0
    gpu_us: float = 0.0
    families: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, missed: int, time: RequestTime | None) -> None:
        for name in ("requests", "prompt", "cached", "computed", "decoded", "again", "generated"):
            setattr(self, name, getattr(self, name) + getattr(request, name))
        self.missed += missed
        self.steps += request.prefills + request.decodes
        if time is not None:
            self.steps_us += time.steps_us
            self.gpu_us += sum(time.us.values())
            self.families.update(time.us)  # type: ignore[arg-type]

    def as_json(self) -> dict[str, Any]:
        return asdict(replace(self, families={})) | {"families": dict(self.families)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class RequestSummary:
    """The rows, the costliest first (turns: in the order of their session), and of what their times are.

    `by`: what a row is; `total`: of all requests. `source` "": there are no times. `tokens`: new tokens of all steps in
    which requests run; `unnamed`: those of steps that name no requests, so that they are in no row.
    """

    by: str
    rows: list[RequestRow]
    total: RequestRow
    times: RequestTimes | None
    source: str
    tokens: int
    unnamed: int

    @property
    def families(self) -> list[str]:
        """Those that took the longest, of all requests."""
        return [name for name, us in self.total.families.most_common() if us]

    def as_json(self, top: int | None) -> dict[str, Any]:
        rows = [row.as_json() for row in self.rows[:top]]
        head: dict[str, Any] = {"by": self.by, "rows": rows, "more": len(self.rows) - len(rows)}
        head |= {"total": self.total.as_json(), "tokens": self.tokens, "unnamed_tokens": self.unnamed}
        if self.times is None:
            return head
        times = {name: getattr(self.times, name) for name in ("total_us", "listed", "steps", "untimed")}
        none = {"us": sum(self.times.none_us.values()), "families": dict(self.times.none_us)}
        return {**head, **times, "no_request": none, "source": self.source, "rule": RULE}


def summarize_requests(
    recording: Recording, times: Mapping[int, CallTime], source: str, by: str = "request"
) -> RequestSummary:
    """One row a request, turn or session; CallError where the Recording tells of none.

    Without `times` there are tokens only.
    """
    return next(request_summaries(recording, times, source, [by]))


def request_summaries(
    recording: Recording, times: Mapping[int, CallTime], source: str, bys: Sequence[str]
) -> Iterator[RequestSummary]:
    """As `summarize_requests`, for each of `bys`, of times that are shared out once."""
    if not recording.requests:
        raise CallError(f"{recording.path}: tells of no requests (kcap records those of vLLM and SGLang)")
    shares = request_times(recording, times, _families(recording)) if times else None
    missed = _missed(recording)

    def row(name: str, number: int | None, places: Iterable[int]) -> RequestRow:
        of_these = RequestRow(name, number)
        for place in places:
            of_these.add(recording.requests[place], missed[place], shares.requests[place] if shares else None)
        return of_these

    total = row("", None, range(len(recording.requests)))
    turns = read_turns(recording.path) if {*bys} != {"request"} else []
    tokens, unnamed = step_tokens(recording), unnamed_tokens(recording)
    for by in bys:
        if by == "request":
            rows = [row(r.id or f"{r.requests:,} more", place, [place]) for place, r in enumerate(recording.requests)]
            rows.sort(key=_order)
        else:
            rows = list(_turn_rows(turns, row, by, recording.path))
        yield RequestSummary(by, rows, total, shares, source if times else "", tokens, unnamed)


def _order(row: RequestRow) -> tuple[float, int, str]:
    return -row.gpu_us, -row.computed - row.decoded, row.name


def _turn_rows(
    turns: Sequence[Turn], row: Callable[[str, int, Iterable[int]], RequestRow], by: str, path: Path
) -> Iterator[RequestRow]:
    if not turns:
        raise CallError(f"{path}: tells of no turns (kcap record --agent-trace keeps them): show it --by request")
    sessions: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        sessions[turn.session].append(turn)
    whole = {
        number: row(_session_name(of), number, [r for turn in of for r in turn.requests])
        for number, of in sessions.items()
    }
    for number in sorted(whole, key=lambda number: _order(whole[number])):
        if by == "session":
            yield whole[number]
        else:
            yield from (row(_turn_name(turn), turn.number, turn.requests) for turn in sessions[number])


def _session_name(turns: Sequence[Turn]) -> str:
    return f"{turns[0].session}: {len(turns):,} turn{'s' if len(turns) > 1 else ''}"


def _turn_name(turn: Turn) -> str:
    """`3.1 calls get_weather`: the second turn of session 3."""
    return f"{turn.session}.{turn.turn} {kind_of(turn)}".rstrip()


def _missed(recording: Recording) -> list[int]:
    """Of each request; 0 where the size of blocks is not known."""
    size, seen = recording.metadata.block_size or 0, set[int]()
    missed = []
    for request in recording.requests:
        known = next((place for place, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        whole = min(known * size, max(request.prompt - 1, 0) // max(size, 1) * size)
        missed.append(max(0, whole - request.cached))
        seen.update(request.blocks)
    return missed


def _families(recording: Recording) -> dict[int, str]:
    from kcap.schemas.derive.derive import derive  # needs torch
    from kcap.schemas.derive.engine_comparison import ATTENTION

    return {
        call: BY_CONTEXT if family in ATTENTION else family for call, family in derive(recording).family_of().items()
    }


def call_times(recording: Recording, rates: Rates | None) -> tuple[dict[int, CallTime], str]:
    """Of the profiled steps or, where none was profiled, estimated at `rates` (None: what is typical); and which it is.

    Empty without torch, by which families are told.
    """
    if importlib.util.find_spec("torch") is None:
        return {}, ""
    rates = rates or typical_rates(recording)
    if times := profiled_times(recording, rates):
        return times, "times: the profiled steps"
    estimated = estimated_times(recording, rates) or {}
    calls = [call for call in recording.kernels() if call.total and call.id in estimated]
    each = {call.id: estimated[call.id] / call.total for call in calls}
    by_phase: dict[int, dict[str, float]] = {
        call.id: {count.phase: each[call.id] for count in call.counts} for call in calls
    }
    source = f"times: an estimate, from bytes and FLOPs of each call at {rates}; kcap replay -o FILE measures them"
    return {number: CallTime(us, None) for number, us in by_phase.items()}, source


def request_table(summary: RequestSummary, rows: Sequence[RequestRow], width: int) -> Table:
    """The rows. `steps ms`: of the steps that a request was in, whole; then what it had of it, and of which families.

    Columns of which no row has anything are left out, and families for which `width` has no room.
    """
    counts = {name: [getattr(row, name) for row in rows] for name in TOKENS}
    columns = {name: [f"{n:,}" if n else "·" for n in column] for name, column in counts.items() if any(column)}
    names = [printable(row.name) for row in rows]
    if summary.times:
        times = {"steps ms": [row.steps_us for row in rows], "its ms": [row.gpu_us for row in rows]}
        families = {name: [row.families[name] for row in rows] for name in summary.families[:MOST_FAMILIES]}
        columns |= {name: [f"{us / 1e3:,.3f}" for us in column] for name, column in (times | families).items()}
        for name in reversed(families):
            if sum(max(map(len, (title, *column))) + GAP for title, column in columns.items()) + LEAST_NAME > width:
                del columns[name]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    table.add_column(summary.by, no_wrap=True, overflow="ellipsis", max_width=MOST_NAME)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, *cells in zip(names, *columns.values(), strict=True):
        table.add_row(Text(name), *cells)
    return table


def request_footer(summary: RequestSummary) -> Iterator[Text]:
    """The sums, and of what the times are."""
    total = summary.total
    yield Text(
        f"{total.requests:,} requests: {total.prompt:,} tokens of prompts ({total.cached:,} found in the prefix cache, "
        f"{total.computed:,} computed), {total.generated:,} generated, {total.again:,} computed again",
        "bold",
    )
    if total.missed:
        yield Text(
            f"missed: {total.missed:,} tokens that an earlier prompt began with, and the cache did not have", "dim"
        )
    if note := unnamed_note(summary):
        yield Text(note, "yellow")
    for place, line in enumerate(time_notes(summary)):
        yield Text(line, "dim" if place else "")


def unnamed_note(summary: RequestSummary) -> str:
    """What was computed for requests that no step names; empty where that is nothing."""
    if not summary.unnamed:
        return ""
    return (
        f"{summary.unnamed:,} of {summary.tokens:,} tokens are of steps that name no requests, "
        "as SGLang's with speculative decoding: they are in no row"
    )


def time_notes(summary: RequestSummary) -> Iterator[str]:
    """What no request accounts for, by which rule times are shared out, and where they are from."""
    times = summary.times
    if times is None:
        return
    none = sum(times.none_us.values())  # differences, which may miss zero by a rounding
    share = f"{none / times.total_us:z.1%}" if times.total_us else "0%"
    yield f"no request accounts for {share} of the time ({none / 1e3:z,.3f} of {times.total_us / 1e3:,.3f} ms)"
    yield RULE
    if times.listed < times.steps:
        yield f"{times.listed:,} of {times.steps:,} steps are listed: the others' time goes by tokens"
    yield summary.source
    if times.untimed:
        yield f"{times.untimed:,} invocations have no time: they are in no share"

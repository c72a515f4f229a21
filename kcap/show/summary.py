"""What `kcap show` says: a Recording's counts, or a trace file's, folded into rows."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Recording
from kcap.schemas.recording.signature import call_key, signature
from kcap.schemas.results import coverage

if TYPE_CHECKING:
    from kcap.schemas.backendbench import TraceLine

By = Literal["kernel", "operator", "family", "phase", "rank"]
BY: tuple[By, ...] = ("kernel", "operator", "family", "phase", "rank")
NO_FAMILY = "(none)"


@dataclass(slots=True)
class Row:
    """One line of the table. `calls`: distinct Calls in it; `graph`: how many of `count` a graph replayed.

    `gpu_us`: microseconds of the engine's own kernels in the profiled steps.
    """

    name: str
    signature: str = ""
    key: str = ""
    parent: str | None = None
    kind: str = "kernel"
    work: bool = True
    calls: int = 0
    count: int = 0
    graph: int = 0
    gpu_us: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)

    def add(self, count: Count) -> None:
        self.count += count.count
        self.phases[count.phase] += count.count
        if count.mode == "graph":
            self.graph += count.count

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"phases": {phase: count for phase, count in self.phases.items() if count}}


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows, most counted first, and what they are of.

    `total`: invocations that shares are of, regions apart; `more`: rows beyond those asked for;
    `regions` and `views`: distinct Calls that are left out; `gpu_us`: of all rows, in the profiled steps.
    """

    by: By
    rows: list[Row]
    total: int
    more: int = 0
    regions: int = 0
    views: int = 0
    metadata: Metadata | None = None
    gpu_us: float = 0.0

    def as_json(self) -> dict[str, Any]:
        head = {"by": self.by, "total": self.total, "more": self.more, "gpu_us": self.gpu_us}
        hidden = {"regions": self.regions, "views": self.views}
        metadata = self.metadata.model_dump(mode="json") if self.metadata else None
        return {**head, "hidden": hidden, "rows": [row.as_json() for row in self.rows], "recording": metadata}


def of_recording(recording: Recording, by: By, everything: bool = False, top: int | None = None) -> Summary:
    """A Recording's kernels; `everything` adds views and allocations and, in rows of their own, regions."""
    kernels = recording.kernels(everything)
    regions = [call for call in recording.calls if call.kind == "region"]
    shown = kernels + regions if everything and by in ("kernel", "operator") else kernels
    times = gpu_times(recording) if by in ("kernel", "operator", "family") else {}
    found = _fold_family(recording, shown, times) if by == "family" else _FOLDS[by](shown, times)
    rows = _of_ranks(found, recording.metadata) if by == "rank" else sorted(found, key=_order)
    total = sum(call.total for call in kernels)
    hidden = (0, 0) if everything else (len(regions), len(recording.calls) - len(regions) - len(kernels))
    gpu_us = sum(row.gpu_us for row in rows)
    return Summary(by, rows[:top], total, len(rows) - len(rows[:top]), *hidden, recording.metadata, gpu_us)


def _of_ranks(rows: Iterable[Row], metadata: Metadata) -> list[Row]:
    """By rank; one that counted nothing has a row, too."""
    found = {row.name: row for row in rows}
    every = [f"rank {rank.rank}" for rank in metadata.ranks]
    return sorted((found.get(name) or Row(name) for name in {*every, *found}), key=lambda row: int(row.name.split()[1]))


def of_trace(lines: Iterable[TraceLine], by: By, top: int | None = None) -> Summary:
    """The same of a trace file, read as a stream: with `top`, memory is that of the rows returned."""
    seen: Counter[str] = Counter()
    found = _folded_lines(lines, seen) if by == "operator" else _line_rows(lines, seen)
    rows = sorted(found, key=_order) if top is None else heapq.nsmallest(top, found, key=_order)
    return Summary(by, rows, seen["invocations"], seen["rows"] - len(rows))


def _order(row: Row) -> tuple[int, str, str]:
    return -row.count, row.name, row.signature


def _line_rows(lines: Iterable[TraceLine], seen: Counter[str]) -> Iterator[Row]:
    for line in lines:
        args = [Argument(value=value) for value in line.args]
        args += [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
        seen.update(rows=1, invocations=line.count)
        yield Row(line.name, signature(args), calls=1, count=line.count)


def _folded_lines(lines: Iterable[TraceLine], seen: Counter[str]) -> Iterable[Row]:
    found: dict[str, Row] = {}
    for line in lines:
        row = found.setdefault(line.name, Row(line.name))
        row.calls += 1
        row.count += line.count
        seen["invocations"] += line.count
    seen["rows"] = len(found)
    return found.values()


Times: TypeAlias = Mapping[int, float]


def gpu_times(recording: Recording) -> Times:
    """Microseconds that the GPU spent in each Call (by id) in the profiled steps; empty where none were profiled."""
    if recording.metadata.coverage is None:
        return {}
    times: dict[int, float] = defaultdict(float)
    for step in coverage.read(recording.path / coverage.FILE):
        for kernel in step.kernels:
            if kernel.call is not None:
                times[kernel.call] += kernel.us
    return times


def _fold_family(recording: Recording, calls: Iterable[Call], times: Times) -> Iterable[Row]:
    from kcap.schemas.derive.derive import derive

    families = derive(recording).family_of()
    return _fold(calls, lambda call, count: (families.get(call.id, NO_FAMILY), "kernel", True), times)


def _by_kernel(calls: Iterable[Call], times: Times) -> Iterator[Row]:
    for call in calls:
        row = Row(call.operator, signature(call.args), call_key(call), call.parent, call.kind, call.work, calls=1)
        row.gpu_us = times.get(call.id, 0.0)
        for count in call.counts:
            row.add(count)
        yield row


Place: TypeAlias = tuple[str, str, bool]


def _fold(calls: Iterable[Call], place: Callable[[Call, Count], Place], times: Times) -> Iterable[Row]:
    """One row for each place (name, kind, work) that a Call's counts fall into; `times` only where that is one."""
    found: dict[Place, Row] = {}
    for call in calls:
        for where in dict.fromkeys(place(call, count) for count in call.counts):
            name, kind, work = where
            row = found.setdefault(where, Row(name, kind=kind, work=work))
            row.calls += 1
            row.gpu_us += times.get(call.id, 0.0)
        for count in call.counts:
            found[place(call, count)].add(count)
    return found.values()


_FOLDS: dict[By, Callable[[Iterable[Call], Times], Iterable[Row]]] = {
    "kernel": _by_kernel,
    "operator": lambda calls, times: _fold(calls, lambda call, count: (call.operator, call.kind, call.work), times),
    "phase": lambda calls, times: _fold(calls, lambda call, count: (count.phase, "kernel", True), times),
    "rank": lambda calls, times: _fold(calls, lambda call, count: (f"rank {count.rank}", "kernel", True), times),
}

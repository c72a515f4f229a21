"""What `kcap show` says: a Recording's counts, or a trace file's, folded into rows, the costliest first."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.recording import Argument, Call, Count, Metadata, Recording
from kcap.schemas.recording.records import kernel_invocations
from kcap.schemas.recording.seam import Seam, seam_of
from kcap.schemas.recording.signature import call_key, call_signature, signature
from kcap.schemas.recording.values import TensorSpec, Value
from kcap.schemas.results import coverage
from kcap.show.estimate import Rates, estimated_times, moved_bytes, typical_rates

if TYPE_CHECKING:
    from kcap.schemas.backendbench import TraceLine
    from kcap.schemas.derive.derive import Derived

By = Literal["kernel", "operator", "family", "phase", "rank"]
BY: tuple[By, ...] = ("kernel", "operator", "family", "phase", "rank")
NO_FAMILY = "(none)"
MOST_VARYING = 4  # parts of arguments, that are named for an operator


@dataclass(slots=True)
class Row:
    """One line of the table. `calls`: distinct Calls in it; `graph`: how many of `count` a graph replayed.

    `varies`: of an operator's row, in what its Calls differ. `shapes`: how many distinct signatures its Calls stand
    for.

    `gpu_us`: microseconds of the engine's own kernels in the profiled steps. `estimated_us`: of all invocations, where
    no step was profiled. `parts`: of a composite, the rows of the operators that it ran as; `kernels`: how often these
    ran. `seams`: where its kernels can be replaced in the engine; None among them: some cannot.
    """

    name: str
    signature: str = ""
    varies: str = ""
    key: str = ""
    parent: str | None = None
    kind: str = "kernel"
    work: bool = True
    calls: int = 0
    shapes: int = 0
    count: int = 0
    graph: int = 0
    gpu_us: float = 0.0
    estimated_us: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    seams: set[Seam | None] = field(default_factory=set)
    parts: list[Row] = field(default_factory=list)
    kernels: float | None = None

    @property
    def invocations(self) -> float:
        """How many invocations of kernels it stands for."""
        return self.count if self.kernels is None else self.kernels

    def add(self, count: Count) -> None:
        self.count += count.count
        self.phases[count.phase] += count.count
        if count.mode == "graph":
            self.graph += count.count

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"phases": {phase: count for phase, count in self.phases.items() if count}}
        fields["seams"] = sorted(self.seams, key=str)
        return {name: value for name, value in fields.items() if name not in ("parts", "kernels")}


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows, the costliest first, and what they are of.

    `total`: invocations that shares are of, those of kernels that do work; `distinct`: of how many Calls they are;
    `in_families`: how many of them are in named families (None unless rows are families); `more`: rows beyond those
    asked for; `regions` and `views`: distinct Calls that are left out; `gpu_us`: of all rows, in the profiled steps;
    `estimated_us`: of all rows, by `rates`, where no step was profiled. `rates` is None where the order is by count.
    """

    by: By
    rows: list[Row]
    total: int
    more: int = 0
    regions: int = 0
    views: int = 0
    metadata: Metadata | None = None
    gpu_us: float = 0.0
    estimated_us: float = 0.0
    rates: Rates | None = None
    distinct: int = 0
    in_families: int | None = None

    def as_json(self) -> dict[str, Any]:
        head: dict[str, Any] = {"by": self.by, "total": self.total, "more": self.more, "gpu_us": self.gpu_us}
        head |= {} if self.in_families is None else {"in_families": self.in_families}
        head |= {"estimated_us": self.estimated_us, "estimated_by": str(self.rates) if self.rates else None}
        hidden = {"regions": self.regions, "views": self.views}
        metadata = self.metadata.model_dump(mode="json") if self.metadata else None
        return {**head, "hidden": hidden, "rows": [row.as_json() for row in self.rows], "recording": metadata}


def of_recording(
    recording: Recording,
    by: By,
    everything: bool = False,
    top: int | None = None,
    rates: Rates | None = None,
    fold: bool = False,
) -> Summary:
    """A Recording's kernels; by kernel or operator, `everything` adds regions, views and allocations.

    These are in no share. `rates`: the device's, for the estimate where no step was profiled (None: what is typical).
    `fold`: a composite is one row, its parts in it.
    """
    kernels = recording.kernels()
    regions = [call for call in recording.calls if call.kind == "region"]
    by_call = by in ("kernel", "operator")
    shown = recording.calls if by_call and everything else kernels
    times = times_of(recording, rates, profiled=by not in ("phase", "rank"))  # profiled steps are a few of one phase
    in_families = None
    if by == "family":
        from kcap.schemas.derive.derive import derive  # needs torch

        derived = derive(recording)
        in_families = derived.invocations_in_families(recording.calls)
        rows = list(_fold_family(derived, shown, times))
    elif fold and not everything and by_call:
        rows = list(_fold_with_composites(shown, regions, by, times))
    else:
        rows = list(_FOLDS[by](shown, times))
    rows = _of_ranks(rows, recording.metadata) if by == "rank" else sorted(rows, key=_order)
    hides = by_call and not everything
    return Summary(
        by,
        rows[:top],
        total=kernel_invocations(kernels),
        distinct=sum(call.total > 0 for call in kernels),
        in_families=in_families,
        more=len(rows) - len(rows[:top]),
        regions=len(regions) if hides else 0,
        views=len(recording.calls) - len(regions) - len(kernels) if hides else 0,
        metadata=recording.metadata,
        gpu_us=sum(row.gpu_us for row in rows),
        estimated_us=sum(row.estimated_us for row in rows),
        rates=times.rates,
    )


def _fold_with_composites(kernels: Iterable[Call], regions: Iterable[Call], by: By, times: Times) -> Iterator[Row]:
    """The rows of kernels, those that ran as parts of one composite in a row of that composite.

    A composite is a region that ran as ATen operators alone: a fused operator that the engine runs piece by piece. A
    part names its region's operator, of two recorders one with its overload, and not its Call: by kernel, the parts'
    time is shared out by the bytes of each Call.
    """
    composites: dict[str, list[Call]] = defaultdict(list)
    parts: dict[str, list[Call]] = defaultdict(list)
    rest = []
    for region in regions:
        if region.total:
            composites[base_of(region.operator)].append(region)
    for call in (*kernels, *regions):
        if call.parent and (call.kind == "region" or call.namespace != "aten"):
            composites.pop(base_of(call.parent), None)
    for call in kernels:
        if call.parent and base_of(call.parent) in composites:
            parts[base_of(call.parent)].append(call)
        else:
            rest.append(call)
    yield from _FOLDS[by](rest, times)
    for operator, inside in parts.items():
        yield from _composite_rows(composites[operator], sorted(_FOLDS[by](inside, times), key=_order), by)


def _composite_rows(calls: list[Call], parts: list[Row], by: By) -> list[Row]:
    """By operator one row, by kernel one for each Call; the parts hang on the first, which takes most of their time."""
    weights = Times(estimated={call.id: float(max(moved_bytes(call), 1) * call.total) for call in calls})
    rows = list(_FOLDS[by](calls, weights))
    total, invocations = sum(row.estimated_us for row in rows), sum(row.count for row in rows)
    for row in rows:
        share = row.estimated_us / total
        row.kind = "composite"
        row.gpu_us = share * sum(part.gpu_us for part in parts)
        row.estimated_us = share * sum(part.estimated_us for part in parts)
        row.kernels = row.count / invocations * sum(part.count for part in parts)
    rows.sort(key=_order)
    rows[0].parts = parts
    return rows


def _of_ranks(rows: Iterable[Row], metadata: Metadata) -> list[Row]:
    """By rank; one that counted nothing has a row, too."""
    by_name = {row.name: row for row in rows}
    names = {f"rank {rank.rank}" for rank in metadata.ranks} | by_name.keys()
    return sorted((by_name.get(name) or Row(name) for name in names), key=lambda row: int(row.name.split()[1]))


def of_trace(lines: Iterable[TraceLine], by: By, top: int | None = None) -> Summary:
    """The same of a trace file, read as a stream: with `top`, memory is that of the rows returned."""
    seen: Counter[str] = Counter()
    unsorted = _operator_rows(lines, seen) if by == "operator" else _line_rows(lines, seen)
    rows = sorted(unsorted, key=_order) if top is None else heapq.nsmallest(top, unsorted, key=_order)
    return Summary(by, rows, seen["invocations"], seen["rows"] - len(rows))


def _order(row: Row) -> tuple[bool, float, int, str, str]:
    """The costliest first; what does no work is last."""
    return not row.work, -(row.gpu_us or row.estimated_us), -row.count, row.name, row.signature


def _line_rows(lines: Iterable[TraceLine], seen: Counter[str]) -> Iterator[Row]:
    for line in lines:
        args = [Argument(value=value) for value in line.args]
        args += [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
        seen.update(rows=1, invocations=line.count)
        yield Row(line.name, signature(args), calls=1, count=line.count)


def _operator_rows(lines: Iterable[TraceLine], seen: Counter[str]) -> Iterable[Row]:
    rows: dict[str, Row] = {}
    for line in lines:
        row = rows.setdefault(line.name, Row(line.name))
        row.calls += 1
        row.count += line.count
        seen["invocations"] += line.count
    seen["rows"] = len(rows)
    return rows.values()


@dataclass(frozen=True)
class Times:
    """Microseconds by the Call's id: measured in the profiled steps, else estimated for all invocations, by `rates`."""

    measured: Mapping[int, float] = field(default_factory=dict)
    estimated: Mapping[int, float] = field(default_factory=dict)
    rates: Rates | None = None

    def add_to(self, row: Row, call: Call, part: float = 1.0) -> None:
        """Add the times of a `part` of the invocations of `call`."""
        row.gpu_us += part * self.measured.get(call.id, 0.0)
        row.estimated_us += part * self.estimated.get(call.id, 0.0)


def times_of(recording: Recording, rates: Rates | None = None, profiled: bool = True) -> Times:
    """What the Calls of `recording` took in its profiled steps; where none were, or not `profiled`, an estimate."""
    if measured := gpu_times(recording) if profiled else {}:
        return Times(measured)
    rates = (rates or typical_rates(recording)) if recording.kernels() else None
    estimated = estimated_times(recording, rates) if rates else None
    return Times() if estimated is None else Times({}, estimated, rates)


def gpu_times(recording: Recording) -> Mapping[int, float]:
    """Microseconds that the GPU spent in each Call (by id) in the profiled steps; empty where none were profiled."""
    if recording.metadata.coverage is None:
        return {}
    times: dict[int, float] = defaultdict(float)
    for step in coverage.read(recording.path / coverage.FILE):
        for kernel in step.kernels:
            if kernel.call is not None:
                times[kernel.call] += kernel.us
    return times


def _fold_family(derived: Derived, calls: Iterable[Call], times: Times) -> Iterable[Row]:
    """A Call whose arguments no Solution could take where it runs has no seam, as in `kcap gain`."""
    families = derived.family_of()
    return _fold(
        calls,
        lambda call, count: (families.get(call.id, NO_FAMILY), "kernel", True),
        times,
        lambda call: None if call.id in derived.why_no_form else seam_of(call),
    )


def _by_kernel(calls: Iterable[Call], times: Times) -> Iterator[Row]:
    for call in calls:
        row = Row(
            call.operator,
            call_signature(call),
            key=call_key(call),
            parent=call.parent,
            kind=call.kind,
            work=call.work,
            calls=1,
            shapes=call.shapes,
            seams={seam_of(call)},
        )
        times.add_to(row, call)
        for count in call.counts:
            row.add(count)
        yield row


RowKey: TypeAlias = tuple[str, str, bool]


def _fold(
    calls: Iterable[Call],
    key_of: Callable[[Call, Count], RowKey],
    times: Times,
    seam: Callable[[Call], Seam | None] = seam_of,
) -> Iterable[Row]:
    """One row for each key (name, kind, work) of a Call's counts, which share out its times."""
    rows: dict[RowKey, Row] = {}
    for call in calls:
        for key in dict.fromkeys(key_of(call, count) for count in call.counts):
            name, kind, work = key
            row = rows.setdefault(key, Row(name, kind=kind, work=work))
            row.calls += 1
            row.shapes += call.shapes
            row.seams.add(seam(call))
        for count in call.counts:
            row = rows[key_of(call, count)]
            row.add(count)
            times.add_to(row, call, count.count / max(call.total, 1))
    return rows.values()


def _by_operator(calls: Sequence[Call], times: Times) -> Iterator[Row]:
    alike: dict[RowKey, list[Call]] = defaultdict(list)
    for call in calls:
        alike[call.operator, call.kind, call.work].append(call)
    for row in _fold(calls, lambda call, count: (call.operator, call.kind, call.work), times):
        row.varies = varies(alike[row.name, row.kind, row.work])
        yield row


def varies(calls: Sequence[Call]) -> str:
    """In what the Calls of one operator differ, most first: `a.shape[0] ×51, dim ×2` (how many values each has)."""
    values: dict[str, set[str]] = defaultdict(set)
    for call in calls:
        values["parent"].add(str(call.parent))
        values["grid"].add(str(call.launch and call.launch.grid))
        values["compiled"].add(str(call.launch and call.launch.model_copy(update={"grid": [], "fragment": None})))
        for index, argument in enumerate(call.args):
            for place, value in _places(argument.name or str(index), argument.value):
                values[place].add(value)
    several = sorted((-len(found), place) for place, found in values.items() if len(found) > 1)
    return ", ".join(f"{place} ×{-negative}" for negative, place in several[:MOST_VARYING])


def _places(name: str, value: Value) -> Iterator[tuple[str, str]]:
    """What of an argument can differ by itself: a tensor's sizes, dtype and layout, any other value as a whole."""
    if not isinstance(value, TensorSpec):
        yield name, str(value)
        return
    yield f"{name}.ndim", str(len(value.shape))
    for dim, size in enumerate(value.shape):
        yield f"{name}.shape[{dim}]", str(size)
    yield f"{name}.dtype", str(value.dtype)
    yield f"{name}.strides", str(value.strides)
    yield f"{name}.offset", str(value.offset)
    yield f"{name}.storage", str(value.storage)
    yield f"{name}.mapped", str(value.mapped)


_FOLDS: dict[By, Callable[[Iterable[Call], Times], Iterable[Row]]] = {
    "kernel": _by_kernel,
    "operator": lambda calls, times: _by_operator(list(calls), times),
    "phase": lambda calls, times: _fold(calls, lambda call, count: (count.phase, "kernel", True), times),
    "rank": lambda calls, times: _fold(calls, lambda call, count: (f"rank {count.rank}", "kernel", True), times),
}

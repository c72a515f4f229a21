"""`kcap diff --by family`: two Recordings' kernels side by side, as a table for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kcap.bench.contents import Contents
from kcap.bench.summary.measured import Timed, on_the_device
from kcap.errors import CallError
from kcap.schemas import measurement
from kcap.schemas.diff_families import FamilyDiff, Line, PhaseDiff, Ran, Side, purposes
from kcap.schemas.diff_recorded import Recorded, Time, diff_families
from kcap.schemas.families.invocation import base_of
from kcap.schemas.records import Call, Metadata
from kcap.schemas.signature import call_key
from kcap.schemas.tables import console, identity

LONGEST = 60  # characters of arguments
COMPARES = "batches differ: counts of a step compare, times and shapes do not"


def compare(a: Contents, b: Contents, measured: tuple[Path, ...]) -> FamilyDiff:
    """CallError unless both are Recordings, and measured or not alike. `measured`: none, or of A and of B."""
    if measured and len(measured) != 2:
        raise CallError("--measurements is given twice: of A, then of B")
    first, second = measured or (None, None)
    return diff_families(_recorded(a, first), _recorded(b, second))


def _recorded(contents: Contents, measured: Path | None) -> Recorded:
    if contents.recording is None:
        raise CallError(f"{contents.path}: only Recordings have phases and families: compare it --by call")
    if measured is None:
        return Recorded(contents.calls, contents.metadata)
    return Recorded(contents.calls, contents.metadata, times(measured, contents))


def times(path: Path, contents: Contents) -> Time:
    """What `kcap replay PATH -o` measured of `contents`; CallError where it is of none of its calls."""
    timed: dict[str, Timed] = defaultdict(Timed)
    for line in on_the_device(list(measurement.read(path))):
        timed[line.key].lines.append(line)
    if not timed.keys() & {call_key(call) for call in contents.calls}:
        raise CallError(f"{path}: of no call of {contents.path} (kcap replay {contents.path} -o {path} measures them)")

    def time(call: Call, phase: str) -> float | None:
        found = timed.get(call_key(call))
        return found.us(phase) if found else None

    return time


def show(found: FamilyDiff, a: Metadata, b: Metadata, rows: int, timed: bool) -> None:
    out = console()
    for letter, metadata in (("A", a), ("B", b)):
        out.print(Text(f"{letter}  {identity(metadata)}", "bold"))
    for warning in found.warnings:
        out.print(Text(warning, "yellow"))
    for phase in found.phases:
        out.print()
        out.print(*_head(phase, timed), sep="\n")
        out.print(_Table(phase, a, b, rows, timed).table)
    for name, (in_a, in_b) in found.alone.items():
        out.print(Text(f"\n{name}: {_sized(in_a, 'step')} in A, {in_b:,} in B: not compared", "yellow"))


def _head(phase: PhaseDiff, timed: bool) -> Iterator[Text]:
    yield Text(f"{phase.phase}: A {_batches(phase.a)}; B {_batches(phase.b)}", "bold")
    if not phase.same_batches:
        yield Text(COMPARES, "yellow")
    for letter, side in (("A", phase.a), ("B", phase.b)) if timed else ():
        if side.untimed:
            yield Text(f"{letter}: {number(side.untimed)} invocations of a step have no time", "yellow")


def _batches(side: Side) -> str:
    """`7 steps of 3 to 4 tokens (3 to 4 sequences)`."""
    tokens = _range([tokens for _, tokens in side.batches], "token")
    sequences = _range([sequences for sequences, _ in side.batches], "sequence")
    told = f" of {tokens} ({sequences})" if tokens and sequences else ""
    return f"{_sized(side.steps, 'step')}{told}"


def _range(sizes: list[int], unit: str) -> str:
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    return f"{low:,} to {_sized(high, unit)}" if high > low else _sized(high, unit)


def _sized(size: int, unit: str) -> str:
    return f"{size:,} {unit}{'' if size == 1 else 's'}"


def number(count: float) -> str:
    return f"{count:,.2f}".rstrip("0").rstrip(".")


class _Table:
    """A phase: what both run, then what only one does, then the sums."""

    def __init__(self, phase: PhaseDiff, a: Metadata, b: Metadata, rows: int, timed: bool) -> None:
        self.phase, self.timed, self.rows = phase, timed, rows
        self.table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        self.table.add_column("kernel", overflow="fold")
        for letter, metadata in (("A", a), ("B", b)):
            self.table.add_column(f"{letter}: {metadata.framework or 'a PyTorch program'}", overflow="fold")
            for name in ("a step", "µs a step") if timed else ("a step",):
                self.table.add_column(name, justify="right", no_wrap=True)
        groups = purposes(phase.lines)
        for title, chosen in SECTIONS.items():
            self._section(title, {name: lines for name, lines in groups.items() if chosen(lines)})
        a_cells, b_cells = (self._cells("", side.count, side.us) for side in (phase.a, phase.b))
        self._add("all", a_cells, b_cells, style="bold")

    def _section(self, title: str, groups: Mapping[str, list[Line]]) -> None:
        if title and groups:
            self.table.add_row("")
            self.table.add_row(Text(title, "bold"))
        for name, lines in list(groups.items())[: self.rows]:
            self._group(name, lines)
        if len(groups) > self.rows:
            self.table.add_row(Text(f"… {len(groups) - self.rows} more: --rows {len(groups)}", "dim"))

    def _group(self, name: str, lines: list[Line]) -> None:
        alone = len(lines) == 1
        if not alone:
            first = self._sum([line.a for line in lines], self.phase.a, name)
            self._add(name, first, self._sum([line.b for line in lines], self.phase.b, name))
        for line in lines:
            self._add(line.name if alone else f"  {line.name}", self._ran(line, line.a), self._ran(line, line.b))

    def _sum(self, ran: list[Ran | None], side: Side, name: str) -> list[str]:
        there = [one for one in ran if one]
        us = sum(one.us or 0.0 for one in there) + side.within.get(name, 0.0)
        return self._cells("", sum(one.count for one in there), us)

    def _ran(self, line: Line, ran: Ran | None) -> list[str]:
        if ran is None:
            return self._cells("·", 0, None)
        return self._cells(_what(line, ran), ran.count, ran.us)

    def _cells(self, what: str, count: float, us: float | None) -> list[str]:
        return [what, number(count) if count else "·", *([f"{us:,.1f}" if us else "·"] if self.timed else [])]

    def _add(self, name: str, a: list[str], b: list[str], *, style: str | None = None) -> None:
        self.table.add_row(*(Text(cell) for cell in (name, *a, *b)), style=style)


def _in_both(lines: list[Line]) -> bool:
    return any(line.a for line in lines) and any(line.b for line in lines)


SECTIONS: dict[str, Callable[[list[Line]], bool]] = {
    "": lambda lines: bool(lines[0].purpose) and _in_both(lines),
    "of no family, in both": lambda lines: not lines[0].purpose and _in_both(lines),
    "only in A": lambda lines: not any(line.b for line in lines),
    "only in B": lambda lines: not any(line.a for line in lines),
}


def _what(line: Line, ran: Ran) -> str:
    """The operators of a Definition; of an operator that has none, its arguments in short."""
    if {base_of(operator) for operator in ran.operators} != {line.name}:
        return ", ".join(ran.operators)
    first, *more = sorted(ran.arguments, key=lambda name: -ran.arguments[name])
    told = first if len(first) <= LONGEST else first[: LONGEST - 1] + "…"
    return f"{told} and {len(more)} more" if more else told

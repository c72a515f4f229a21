"""How `kcap replay --fidelity` looks: for each kind of step its kernels by share, what is missing, totals, verdict.

Under the table, one line for each remark, is what to know before believing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.calls.report import device_title, duration
from kcap.replay.fidelity.compare import ComparedCall, ComparedStep, MissingCall
from kcap.replay.fidelity.verdict import PROGRAM, Fidelity, KindFidelity, ProgramTime
from kcap.schemas.recording.signature import signature
from kcap.schemas.validation.report import printable
from kcap.show.kernel_name import shorten

NUMBER_COLUMNS = ("count", "share", "engine", "serving", "ratio", "Program", "ratio")


def print_kinds(
    out: Console, found: Fidelity, environment: Mapping[str, object], rows: int, recorded_on: str | None = None
) -> None:
    """Print one table for each kind of step, then the verdict. `recorded_on`: the engine's GPU."""
    out.print(Text(device_title(dict(environment)), "bold"))
    if recorded_on is not None and recorded_on != environment.get("device_name"):
        out.print(Text(f"recorded on {printable(recorded_on)}: the times of two GPUs are no match", "yellow"))
    for kind in found.kinds:
        out.print(Text(f"\n{kind.kind}: {kind.steps} step{'' if kind.steps == 1 else 's'} profiled", "bold"))
        out.print(kind_table(kind, rows))
        for line in kind_remarks(kind, rows):
            out.print(line)
    for line in verdict_lines(found):
        out.print(line)


def kind_table(kind: KindFidelity, rows: int) -> Table:
    """A row for each Call, for what is missing, and for the totals; times are of one step."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in NUMBER_COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("kernel", no_wrap=True, overflow="ellipsis", ratio=1)
    inside = {row.call.id: row for row in kind.in_program.rows}
    for row in kind.serving.rows[:rows]:
        out.add_row(*_cells(row, inside.get(row.call.id)))
    for one in kind.serving.missing[:rows]:
        out.add_row(*_missing(one, inside.get(one.call.id) if one.call else None))
    out.add_section()
    out.add_row(*_totals(kind))
    out.add_row(*_span(kind))
    return out


def _cells(row: ComparedCall, inside: ComparedCall | None) -> Iterator[Text]:
    yield Text(f"{row.count:,.4g}")
    yield Text(f"{row.share:.1%}")
    yield Text(duration(row.engine_us))
    yield Text(duration(row.replayed_us))
    yield _ratio(row.ratio, row.judged and not row.within, _marks(row))
    yield from _inside(inside)
    yield Text.assemble(printable(row.call.operator), ("  " + printable(signature(row.call.args)), "dim"))


def _marks(row: ComparedCall) -> str:
    return (OTHER if row.other else "") + (WARM if row.replayed.how.warm else "")


def _inside(row: ComparedCall | None) -> Iterator[Text]:
    yield Text("·", "dim") if row is None else Text(duration(row.replayed_us))
    yield Text("·", "dim") if row is None else _ratio(row.ratio, row.judged and not row.within)


def _missing(one: MissingCall, inside: ComparedCall | None) -> Iterator[Text]:
    yield Text(f"{one.count:,.4g}", "yellow")
    yield Text(f"{one.share:.1%}", "yellow")
    yield Text(duration(one.engine_us), "yellow")
    yield Text("missing", "yellow")
    yield Text("")
    yield from _inside(inside)
    yield Text(f"{printable(shorten(one.name))}: {printable(one.reason)}", "yellow")


def _totals(kind: KindFidelity) -> Iterator[Text]:
    def both(state: ComparedStep) -> Iterator[Text]:
        yield Text(duration(state.replayed_us), "bold")
        yield _ratio(state.replayed_us / state.engine_us if state.engine_us else None, False)

    yield from (Text(""), Text("100%"), Text(duration(kind.serving.engine_us), "bold"))
    yield from both(kind.serving)
    yield from both(kind.in_program)
    off = f"{kind.serving.error:.1%} off in serving, {kind.in_program.error:.1%} in the Program"
    yield Text(f"in total, {off}", "bold")


def _span(kind: KindFidelity) -> Iterator[Text]:
    yield from (Text(""), Text(""), Text(duration(kind.span.own_us) if kind.span else "·", "bold"), Text(""), Text(""))
    yield Text("·" if kind.program.us is None else duration(kind.program.us), "bold")
    yield _ratio(kind.span_ratio, False)
    waits = f", less {duration(kind.span.waits_us)} of waiting for the host" if kind.span else ""
    yield Text(f"the step's span{waits}", "bold")


def _ratio(ratio: float | None, bad: bool, mark: str = "") -> Text:
    return Text("·" if ratio is None else f"{ratio:.1%}{mark}", "bold red" if bad else "")


def verdict_lines(found: Fidelity) -> Iterator[Text]:
    """Whether the replay holds, and by which state; if not, all that is outside the bounds."""
    total = f"{duration(found.replayed_us())} replayed for {duration(found.engine_us())} of the engine's GPU time"
    states = " and ".join(f"{count} by {_named(state)}" for state, count in found.by_state().items())
    taken = f" (kinds of steps: {states})" if states else ""
    yield Text(f"\nin all profiled steps: {total}, {found.error:.1%} off{taken}", "bold")
    for kind in found.kinds:
        yield from _kind_verdict(kind)


def _kind_verdict(kind: KindFidelity) -> Iterator[Text]:
    if lines := list(kind.outside()):
        yield Text(f"outside the bounds: {kind.kind}", "yellow")
        yield from (Text(f"  {printable(line)}", "yellow") for line in lines)
        return
    by = " and ".join(_named(state.state) for state in kind.holding)
    yield Text(f"within the bounds, by {by}: {kind.kind}", "green")


def _named(state: str) -> str:
    return "the Program" if state == PROGRAM else state


OTHER, WARM = "†", "‡"


CONTEXT_BOUND = 0.005  # how far a Sample's context may be from the profiled steps' without a word


CLOCK_BOUND = 0.03  # how far the GPU's clock in the engine may be from that in the replay without a word


def kind_remarks(kind: KindFidelity, rows: int) -> Iterator[Text]:
    """All of `kind`, of whose kernels the table has the first `rows`."""
    if more := kind.serving.rows[rows:]:
        yield Text(f"{kernels_named(more, 'more ')}: --rows {len(kind.serving.rows)} shows them", "dim")
    for line in (*_of_rows(kind.serving.rows), *_noted(kind), *_of_program(kind.program), *_of_clocks(kind)):
        yield Text(printable(line), "yellow")
    contexts = [row.replayed.context for row in kind.serving.rows if row.replayed.context is not None]
    if contexts and max(abs(one - 1) for one in contexts) > CONTEXT_BOUND:
        yield Text(f"Samples' contexts are {min(contexts):.1%} to {max(contexts):.1%} of the profiled steps'", "dim")


def kernels_named(of: Sequence[ComparedCall | MissingCall], which: str = "") -> str:
    """`2 more kernels, 28.6% of the time`."""
    return f"{len(of)} {which}kernel{'' if len(of) == 1 else 's'}, {sum(one.share for one in of):.1%} of the time"


def _of_rows(rows: Sequence[ComparedCall]) -> Iterator[str]:
    if others := [row for row in rows if row.other]:
        yield f"{OTHER} {kernels_named(others)}: replayed by kernels of other names than the engine's"
    if warm := [row for row in rows if row.replayed.how.warm]:
        yield f"{WARM} {kernels_named(warm)}: replayed with warm caches and not as in serving"


def _noted(kind: KindFidelity) -> Iterator[str]:
    """Each note on Calls replayed alone, once, with the Calls that have it; those of most time first."""
    told: dict[str, list[ComparedCall | MissingCall]] = {}
    calls: list[ComparedCall | MissingCall] = [*kind.serving.rows, *kind.serving.missing]
    for one in calls:
        for note in one.replayed.how.remarks:
            told.setdefault(note, []).append(one)
    for note, of in sorted(told.items(), key=lambda item: -sum(one.share for one in item[1])):
        yield f"{kernels_named(of)}: {note}"


def _of_program(program: ProgramTime) -> Iterator[str]:
    if program.left_out:
        yield f"the Program lacks {program.left_out:,} of its {program.invocations:,} kernels"
    if program.unmatched_us:
        yield f"{duration(program.unmatched_us)} of the Program's kernels are of no known call"
    if program.stretches > 1:
        yield f"the Program took {program.stretches:,} CUDA graphs"
    if program.how.stop == "limit":
        yield "the time was up before the Program's samples agreed"
    yield from (f"the Program: {note}" for note in program.how.remarks)


def _of_clocks(kind: KindFidelity) -> Iterator[str]:
    engine, replay = kind.sm_mhz, kind.program.sm_mhz
    if engine and replay and abs(engine / replay - 1) > CLOCK_BOUND:
        yield f"the GPU's clock was {engine:,.0f} MHz in the engine and {replay:,.0f} MHz in the Program: times differ"

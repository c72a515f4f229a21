"""The output of `kcap replay --compare-engine`: for each kind of step its kernels, missing time, totals, verdict.

Under each table, a line for each caveat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.calls.report import device_title, duration
from kcap.replay.fidelity.compare import KERNEL_BOUND, ComparedCall, ComparedStep, MissingCall
from kcap.replay.fidelity.verdict import PROGRAM, Fidelity, KindFidelity, ProgramTime
from kcap.schemas.recording.signature import call_signature
from kcap.schemas.validation.report import printable
from kcap.show.console import plain_table, print_table
from kcap.show.kernel_name import shorten
from kcap.system.worker_process import Environment

NUMBER_COLUMNS = ("count", "share", "engine", "serving", "ratio", "Program", "ratio")


def print_kinds(
    out: Console, fidelity: Fidelity, environment: Environment, rows: int, recorded_on: str | None = None
) -> None:
    """Print one table for each kind of step, then the verdict. `recorded_on`: the engine's GPU."""
    out.print(Text(device_title(environment), "bold"))
    if recorded_on is not None and recorded_on != environment.get("device_name"):
        out.print(Text(f"recorded on {printable(recorded_on)}: the times of two GPUs are no match", "yellow"))
    for kind in fidelity.kinds:
        out.print(Text(f"\n{kind.kind}: {kind.steps} step{'' if kind.steps == 1 else 's'} profiled", "bold"))
        print_table(out, kind_table(kind, rows))
        for line in kind_notes(kind, rows):
            out.print(line)
    for line in verdict_lines(fidelity):
        out.print(line)


def kind_table(kind: KindFidelity, rows: int) -> Table:
    """A row for each Call, for missing time, and for the totals; times are of one step."""
    table = plain_table(NUMBER_COLUMNS, ("kernel",))
    inside = {row.call.id: row for row in kind.in_program.rows}
    for row in kind.serving.rows[:rows]:
        table.add_row(*_cells(row, inside.get(row.call.id)))
    for missing in kind.serving.missing[:rows]:
        table.add_row(*_missing(missing, inside.get(missing.call.id) if missing.call else None))
    table.add_section()
    table.add_row(*_totals(kind))
    table.add_row(*_span(kind))
    return table


def _cells(row: ComparedCall, inside: ComparedCall | None) -> Iterator[Text]:
    yield Text(f"{row.count:,.4g}")
    yield Text(f"{row.share:.1%}")
    yield Text(duration(row.engine_us))
    yield Text(duration(row.replayed_us))
    yield _ratio(row.ratio, row.judged and not row.within, _marks(row))
    yield from _inside(inside)
    yield Text.assemble(printable(row.call.operator), ("  " + printable(call_signature(row.call)), "dim"))


def _marks(row: ComparedCall) -> str:
    marks = {OTHER: row.other, WARM: row.replayed.provenance.warm, BESIDE: row.beside > KERNEL_BOUND}
    return "".join(mark for mark, holds in marks.items() if holds)


def _inside(row: ComparedCall | None) -> Iterator[Text]:
    yield Text("·", "dim") if row is None else Text(duration(row.replayed_us))
    yield Text("·", "dim") if row is None else _ratio(row.ratio, row.judged and not row.within)


def _missing(missing: MissingCall, inside: ComparedCall | None) -> Iterator[Text]:
    yield Text(f"{missing.count:,.4g}", "yellow")
    yield Text(f"{missing.share:.1%}", "yellow")
    yield Text(duration(missing.engine_us), "yellow")
    yield Text("missing", "yellow")
    yield Text("")
    yield from _inside(inside)
    yield Text(f"{printable(shorten(missing.name))}: {printable(missing.reason)}", "yellow")


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
    waits += f" and {duration(kind.span.peers_us)} for other ranks" if kind.span and kind.span.peers_us else ""
    yield Text(f"the step's span{waits}", "bold")


def _ratio(ratio: float | None, bad: bool, mark: str = "") -> Text:
    return Text("·" if ratio is None else f"{ratio:.1%}{mark}", "bold red" if bad else "")


def verdict_lines(fidelity: Fidelity) -> Iterator[Text]:
    """Whether the replay is within the bounds, and by which state; if not, all that is outside."""
    total = f"{duration(fidelity.replayed_us())} replayed for {duration(fidelity.engine_us())} of the engine's GPU time"
    states = " and ".join(f"{count} by {_named(state)}" for state, count in fidelity.by_state().items())
    taken = f" (kinds of steps: {states})" if states else ""
    yield Text(f"\nin all profiled steps: {total}, {fidelity.error:.1%} off{taken}", "bold")
    for kind in fidelity.kinds:
        yield from _kind_verdict(kind)


def _kind_verdict(kind: KindFidelity) -> Iterator[Text]:
    if lines := list(kind.violations()):
        yield Text(f"outside the bounds: {kind.kind}", "yellow")
        yield from (Text(f"  {printable(line)}", "yellow") for line in lines)
        return
    by = " and ".join(_named(state.state) for state in kind.states_within_bounds)
    yield Text(f"within the bounds, by {by}: {kind.kind}", "green")


def _named(state: str) -> str:
    return "the Program" if state == PROGRAM else state


OTHER, WARM, BESIDE = "†", "‡", "§"
CONTEXT_BOUND = 0.005  # how far a Sample's context may be from the profiled steps' without a note
CLOCK_BOUND = 0.03  # how far the GPU's clock in the engine may be from that in the replay without a note


def kind_notes(kind: KindFidelity, rows: int) -> Iterator[Text]:
    """The caveats of `kind`; the table has the first `rows` of its kernels."""
    if more := kind.serving.rows[rows:]:
        yield Text(f"{kernels_named(more, 'more ')}: --rows {len(kind.serving.rows)} shows them", "dim")
    of_calls = (*_of_rows(kind.serving.rows), *_of_batches(kind), *_noted(kind))
    for line in (*of_calls, *_of_program(kind.program), *_of_clocks(kind)):
        yield Text(printable(line), "yellow")
    contexts = [row.replayed.context for row in kind.serving.rows if row.replayed.context is not None]
    if contexts and max(abs(context - 1) for context in contexts) > CONTEXT_BOUND:
        yield Text(f"Samples' contexts are {min(contexts):.1%} to {max(contexts):.1%} of the profiled steps'", "dim")


def kernels_named(calls: Sequence[ComparedCall | MissingCall], qualifier: str = "") -> str:
    """`2 more kernels, 28.6% of the time`."""
    share = sum(call.share for call in calls)
    return f"{len(calls)} {qualifier}kernel{'' if len(calls) == 1 else 's'}, {share:.1%} of the time"


def _of_rows(rows: Sequence[ComparedCall]) -> Iterator[str]:
    if others := [row for row in rows if row.other]:
        yield f"{OTHER} {kernels_named(others)}: replayed by kernels of other names than the engine's"
    if warm := [row for row in rows if row.replayed.provenance.warm]:
        yield f"{WARM} {kernels_named(warm)}: replayed with warm caches and not as in serving"
    if beside := [row for row in rows if row.beside > KERNEL_BOUND]:
        yield f"{BESIDE} {kernels_named(beside)}: ran beside kernels of other calls, so not judged alone"


def _of_batches(kind: KindFidelity) -> Iterator[str]:
    """Where a graph pads several batches to one size, all Samples of a Call may be of others."""
    by_batch: dict[int, list[ComparedCall]] = {}
    for row in kind.serving.rows:
        if row.replayed.sequences not in (None, kind.kind.sequences):
            by_batch.setdefault(row.replayed.sequences, []).append(row)
    for sequences, rows in sorted(by_batch.items()):
        wanted = kind.kind.sequences
        yield f"{kernels_named(rows)}: replayed on a batch of {sequences}, as no Sample is of one of {wanted}"


def _noted(kind: KindFidelity) -> Iterator[str]:
    """Each note on Calls replayed alone, once, with the share of the Calls that have it; most time first."""
    by_note: dict[str, list[ComparedCall | MissingCall]] = {}
    all_calls: list[ComparedCall | MissingCall] = [*kind.serving.rows, *kind.serving.missing]
    for compared in all_calls:
        for note in compared.replayed.provenance.distinct_notes:
            by_note.setdefault(note, []).append(compared)
    for note, calls in sorted(by_note.items(), key=lambda item: -sum(compared.share for compared in item[1])):
        yield f"{kernels_named(calls)}: {note}"


def _of_program(program: ProgramTime) -> Iterator[str]:
    if program.left_out:
        yield f"the Program lacks {program.left_out:,} of its {program.invocations:,} kernels"
    if program.unmatched_us:
        yield f"{duration(program.unmatched_us)} of the Program's kernels are of no known call"
    if program.stretches > 1:
        yield f"the Program took {program.stretches:,} CUDA graphs"
    if program.provenance.stop == "limit":
        yield "the time was up before the Program's samples agreed"
    yield from (f"the Program: {note}" for note in program.provenance.distinct_notes)


def _of_clocks(kind: KindFidelity) -> Iterator[str]:
    engine, replay = kind.sm_mhz, kind.program.sm_mhz
    if engine and replay and abs(engine / replay - 1) > CLOCK_BOUND:
        yield f"the GPU's clock was {engine:,.0f} MHz in the engine and {replay:,.0f} MHz in the Program: times differ"

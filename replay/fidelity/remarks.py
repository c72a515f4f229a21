"""What to know before believing the table of `kcap replay --fidelity`: one line for each remark, under the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from kcap.replay.fidelity.compare import Missing, Row
from kcap.replay.fidelity.verdict import KindFidelity, ProgramTime
from kcap.replay.report import duration
from kcap.schemas.validation.report import printable

OTHER, WARM = "†", "‡"
CONTEXT = 0.005  # how far a Sample's context may be from the profiled steps' without a word
CLOCK = 0.03  # how far the GPU's clock in the engine may be from that in the replay without a word


def remarks(kind: KindFidelity, rows: int) -> Iterator[Text]:
    """All of `kind`, of whose kernels the table has the first `rows`."""
    if more := kind.serving.rows[rows:]:
        yield Text(f"{kernels(more, 'more ')}: --rows {len(kind.serving.rows)} shows them", "dim")
    for line in (*_of_rows(kind.serving.rows), *_noted(kind), *_of_program(kind.program), *_of_clocks(kind)):
        yield Text(printable(line), "yellow")
    contexts = [row.replayed.context for row in kind.serving.rows if row.replayed.context is not None]
    if contexts and max(abs(one - 1) for one in contexts) > CONTEXT:
        yield Text(f"Samples' contexts are {min(contexts):.1%} to {max(contexts):.1%} of the profiled steps'", "dim")


def kernels(of: Sequence[Row | Missing], which: str = "") -> str:
    """`2 more kernels, 28.6% of the time`."""
    return f"{len(of)} {which}kernel{'' if len(of) == 1 else 's'}, {sum(one.share for one in of):.1%} of the time"


def _of_rows(rows: Sequence[Row]) -> Iterator[str]:
    if others := [row for row in rows if row.other]:
        yield f"{OTHER} {kernels(others)}: replayed by kernels of other names than the engine's"
    if warm := [row for row in rows if row.replayed.how.warm]:
        yield f"{WARM} {kernels(warm)}: replayed with warm caches and not as in serving"


def _noted(kind: KindFidelity) -> Iterator[str]:
    """Each note on Calls replayed alone, once, with the Calls that have it; those of most time first."""
    told: dict[str, list[Row | Missing]] = {}
    calls: list[Row | Missing] = [*kind.serving.rows, *kind.serving.missing]
    for one in calls:
        for note in one.replayed.how.remarks:
            told.setdefault(note, []).append(one)
    for note, of in sorted(told.items(), key=lambda item: -sum(one.share for one in item[1])):
        yield f"{kernels(of)}: {note}"


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
    if engine and replay and abs(engine / replay - 1) > CLOCK:
        yield f"the GPU's clock was {engine:,.0f} MHz in the engine and {replay:,.0f} MHz in the Program: times differ"

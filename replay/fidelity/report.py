"""How `kcap replay --fidelity` looks: for each kind of step its kernels by share, what is missing, totals, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.fidelity.compare import Compared, Missing, Row
from kcap.replay.fidelity.remarks import OTHER, WARM, remarks
from kcap.replay.fidelity.verdict import PROGRAM, Fidelity, KindFidelity
from kcap.replay.report import duration, title
from kcap.schemas.kernel_name import shorten
from kcap.schemas.signature import signature
from kcap.schemas.validation.report import printable

NUMBERS = ("count", "share", "engine", "serving", "ratio", "Program", "ratio")


def show(
    out: Console, found: Fidelity, environment: Mapping[str, object], rows: int, recorded_on: str | None = None
) -> None:
    """Print one table for each kind of step, then the verdict. `recorded_on`: the engine's GPU."""
    out.print(Text(title(dict(environment)), "bold"))
    if recorded_on is not None and recorded_on != environment.get("device_name"):
        out.print(Text(f"recorded on {printable(recorded_on)}: the times of two GPUs are no match", "yellow"))
    for kind in found.kinds:
        out.print(Text(f"\n{kind.kind}: {kind.steps} step{'' if kind.steps == 1 else 's'} profiled", "bold"))
        out.print(table(kind, rows))
        for line in remarks(kind, rows):
            out.print(line)
    for line in verdict(found):
        out.print(line)


def table(kind: KindFidelity, rows: int) -> Table:
    """A row for each Call, for what is missing, and for the totals; times are of one step."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in NUMBERS:
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


def _cells(row: Row, inside: Row | None) -> Iterator[Text]:
    yield Text(f"{row.count:,.4g}")
    yield Text(f"{row.share:.1%}")
    yield Text(duration(row.engine_us))
    yield Text(duration(row.replayed_us))
    yield _ratio(row.ratio, row.judged and not row.within, _marks(row))
    yield from _inside(inside)
    yield Text.assemble(printable(row.call.operator), ("  " + printable(signature(row.call.args)), "dim"))


def _marks(row: Row) -> str:
    return (OTHER if row.other else "") + (WARM if row.replayed.how.warm else "")


def _inside(row: Row | None) -> Iterator[Text]:
    yield Text("·", "dim") if row is None else Text(duration(row.replayed_us))
    yield Text("·", "dim") if row is None else _ratio(row.ratio, row.judged and not row.within)


def _missing(one: Missing, inside: Row | None) -> Iterator[Text]:
    yield Text(f"{one.count:,.4g}", "yellow")
    yield Text(f"{one.share:.1%}", "yellow")
    yield Text(duration(one.engine_us), "yellow")
    yield Text("missing", "yellow")
    yield Text("")
    yield from _inside(inside)
    yield Text(f"{printable(shorten(one.name))}: {printable(one.reason)}", "yellow")


def _totals(kind: KindFidelity) -> Iterator[Text]:
    def both(state: Compared) -> Iterator[Text]:
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


def verdict(found: Fidelity) -> Iterator[Text]:
    """Whether the replay holds, and by which state; if not, all that is outside the bounds."""
    total = f"{duration(found.replayed_us())} replayed for {duration(found.engine_us())} of the engine's GPU time"
    states = " and ".join(f"{count} by {_named(state)}" for state, count in found.by_state().items())
    taken = f" (kinds of steps: {states})" if states else ""
    yield Text(f"\nin all profiled steps: {total}, {found.error:.1%} off{taken}", "bold")
    for kind in found.kinds:
        yield from _verdict(kind)


def _verdict(kind: KindFidelity) -> Iterator[Text]:
    if lines := list(kind.outside()):
        yield Text(f"outside the bounds: {kind.kind}", "yellow")
        yield from (Text(f"  {printable(line)}", "yellow") for line in lines)
        return
    by = " and ".join(_named(state.state) for state in kind.holding)
    yield Text(f"within the bounds, by {by}: {kind.kind}", "green")


def _named(state: str) -> str:
    return "the Program" if state == PROGRAM else state

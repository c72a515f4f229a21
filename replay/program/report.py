"""How `kcap replay --program` looks: for each Program its time, then its Calls by their share of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.calls.report import device_title, duration, percent
from kcap.schemas.results.measurement import ProgramCall, ProgramMeasurement
from kcap.schemas.validation.report import printable


def print_programs(out: Console, measured: list[ProgramMeasurement], environment: dict[str, object], rows: int) -> None:
    """Print every Program, in the order given."""
    out.print(Text(device_title(environment), style="bold"))
    for one in measured:
        out.print(Text(f"\n{program_heading(one)}", "bold"))
        if one.status != "ok":
            out.print(Text(f"{one.status}: {printable(one.reason or '')}", "bold red"))
        else:
            out.print(Text(program_times(one)))
            out.print(program_table(one, rows))
        for line in program_remarks(one):
            out.print(line)


def program_heading(one: ProgramMeasurement) -> str:
    """`decode, full graphs of 16 tokens: program 3, 512 times, 386 kernels`."""
    graphs = {"eager": "eager", "piecewise": "piecewise graphs", "full": "full graphs"}[one.mode]
    size = f" of {one.padded} tokens" if one.padded else ""
    which = f"program {one.program}" + (f" of step {one.step}" if one.step is not None else "")
    return f"{one.phase}, {graphs}{size}: {which}, {times_run_text(one.count)}, {one.invocations:,} kernels"


def times_run_text(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def program_times(one: ProgramMeasurement) -> str:
    """Both clocks, each named."""
    how = f"{one.method}, {one.stretches} CUDA graphs" if one.stretches > 1 else str(one.method)
    parts = [f"one run {duration(one.median_us or 0)} ({how})"]
    parts += [f"its kernels {duration(one.kernel_us)} (durations)"] if one.kernel_us is not None else []
    return ", ".join(parts)


def program_table(one: ProgramMeasurement, rows: int) -> Table:
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in ("count × time", "share", "time", "count", "sets"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("kernel", no_wrap=True, overflow="ellipsis", ratio=1)
    timed = sorted((call for call in one.calls if call.us is not None), key=lambda call: -call_total(call))
    whole = sum(map(call_total, timed))
    for call in timed[:rows]:
        cells = duration(call_total(call)), percent(call_total(call), whole), duration(call.us or 0), f"{call.count:,}"
        out.add_row(*cells, str(call.sets), f"{printable(call.operator)}  call {call.call}")
    return out


def call_total(call: ProgramCall) -> float:
    return call.count * (call.us or 0)


def program_remarks(one: ProgramMeasurement) -> Iterator[Text]:
    """What the time lacks, and what to know of it."""
    if one.partial:
        part = percent(one.left_out, one.invocations)
        yield Text(f"partial: {one.left_out:,} of {one.invocations:,} kernels ({part}) are not in it", "bold yellow")
    for call in one.calls:
        if call.status in ("skipped", "failed"):
            reason = printable(call.reason or "")
            yield Text(f"{call.status}: {printable(call.operator)}, {call.count:,} times: {reason}", "yellow")
    if host := sum(call.count for call in one.calls if call.status == "host"):
        yield Text(f"{host:,} invocations are the host's work, which is no GPU time", "dim")
    for note in one.notes:
        yield Text(printable(note), "yellow")

"""The output of `kcap replay --program`: for each Program its time, then its Calls by their share of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.calls.report import device_title, duration, percent
from kcap.schemas.results.measurement import ProgramCall, ProgramMeasurement
from kcap.schemas.validation.report import printable
from kcap.show.console import plain_table, print_table
from kcap.system.worker_process import Environment


def print_programs(out: Console, measurements: list[ProgramMeasurement], environment: Environment, rows: int) -> None:
    """Print every Program, in the order given."""
    out.print(Text(device_title(environment), style="bold"))
    for program in measurements:
        out.print(Text(f"\n{program_heading(program)}", "bold"))
        if program.status != "ok":
            out.print(Text(f"{program.status}: {printable(program.reason or '')}", "bold red"))
        else:
            out.print(Text(program_times(program)))
            print_table(out, program_table(program, rows))
        for line in program_notes(program):
            out.print(line)


def program_heading(program: ProgramMeasurement) -> str:
    """`decode, full graphs of 16 tokens: program 3, 512 times, 386 kernels`."""
    graphs = {"eager": "eager", "piecewise": "piecewise graphs", "full": "full graphs"}[program.mode]
    size = f" of {program.padded} tokens" if program.padded else ""
    which = f"program {program.program}" + (f" of step {program.step}" if program.step is not None else "")
    return f"{program.phase}, {graphs}{size}: {which}, {times_run_text(program.count)}, {program.invocations:,} kernels"


def times_run_text(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def program_times(program: ProgramMeasurement) -> str:
    """Both clocks, each named."""
    how = f"{program.method}, {program.stretches} CUDA graphs" if program.stretches > 1 else str(program.method)
    parts = [f"one run {duration(program.median_us or 0)} ({how})"]
    parts += [f"its kernels {duration(program.kernel_us)} (durations)"] if program.kernel_us is not None else []
    if program.ranks:
        waited = f", which waited {duration(program.waited_us)}" if program.waited_us is not None else ""
        parts += [f"by {program.ranks} ranks{waited} for one another in collectives"]
    return ", ".join(parts)


def program_table(program: ProgramMeasurement, rows: int) -> Table:
    table = plain_table(("count × time", "share", "time", "count", "sets"), ("kernel",))
    timed = sorted((call for call in program.calls if call.us is not None), key=lambda call: -call_total(call))
    total = sum(map(call_total, timed))
    for call in timed[:rows]:
        cells = duration(call_total(call)), percent(call_total(call), total), duration(call.us or 0), f"{call.count:,}"
        table.add_row(*cells, str(call.sets), f"{printable(call.operator)}  call {call.call}")
    return table


def call_total(call: ProgramCall) -> float:
    return call.count * (call.us or 0)


def program_notes(program: ProgramMeasurement) -> Iterator[Text]:
    """What the time does not include, and caveats."""
    if program.partial:
        share = percent(program.left_out, program.invocations)
        yield Text(
            f"partial: {program.left_out:,} of {program.invocations:,} kernels ({share}) are not in it", "bold yellow"
        )
    for call in program.calls:
        if call.status in ("skipped", "failed"):
            reason = printable(call.reason or "")
            yield Text(f"{call.status}: {printable(call.operator)}, {call.count:,} times: {reason}", "yellow")
    if host := sum(call.count for call in program.calls if call.status == "host"):
        yield Text(f"{host:,} invocations are the host's work, which is no GPU time", "dim")
    for note in program.notes:
        yield Text(printable(note), "yellow")

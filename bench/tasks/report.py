"""How a Verdict looks in a terminal: the status, what is wrong and where, a row a Workload, the gain, what next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from kcap.bench.run.summary.report import describe_wrong
from kcap.replay.calls.report import duration
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.results.verdict import Gain, HeldOutVerdict, Spread, Verdict, WorkloadVerdict
from kcap.schemas.validation.report import printable
from kcap.show.console import plain_table, print_table

NUMBERS = ("share", "time", "spread", "baseline", "speedup", "floor", "× floor")
SHOWN_WORKLOADS = 40
SHOWN_LOG = 12  # lines


def print_verdict(out: Console, verdict: Verdict) -> None:
    style = "green" if verdict.status == "PASSED" else "red"
    head = f"{verdict.status}  {printable(verdict.definition)}  {printable(verdict.solution)}"
    out.print(Text(head, f"bold {style}"), end="")
    out.print(Text(f"  {verdict.device_name}" if verdict.device_name else "", "dim"))
    for line in failure_lines(verdict):
        out.print(line)
    _print_workloads(out, verdict)
    for line in closing_lines(verdict):
        out.print(line)


def failure_lines(verdict: Verdict) -> Iterator[Text]:
    """Why it does not pass."""
    if verdict.reason:
        yield Text(printable(verdict.reason), "red")
    for message in verdict.compiler:
        column = f":{message.column}" if message.column else ""
        yield Text(printable(f"  {message.file}:{message.line}{column}: {message.severity}: {message.text}"))
    if verdict.log and not verdict.compiler and verdict.status in ("COMPILE_ERROR", "RUNTIME_ERROR"):
        for line in verdict.log.splitlines()[-SHOWN_LOG:]:
            yield Text(printable(f"  {line}"), "dim")
    for workload in verdict.workloads:
        for wrong in workload.wrong:
            yield Text(printable(f"  at {sizes_of(workload)}: {describe_wrong(wrong)}"))


def sizes_of(workload: WorkloadVerdict) -> str:
    """`m 64, n 4096`, by which a person knows a Workload again; without sizes its id."""
    return ", ".join(f"{name} {size}" for name, size in workload.axes.items()) or workload.workload


def _print_workloads(out: Console, verdict: Verdict) -> None:
    if not verdict.workloads:
        return
    table = plain_table(NUMBERS, ("bound by", "sizes", "status"))
    for workload in verdict.workloads[:SHOWN_WORKLOADS]:
        table.add_row(*workload_cells(workload))
    print_table(out, table)
    if len(verdict.workloads) > SHOWN_WORKLOADS:
        out.print(Text(f"{len(verdict.workloads) - SHOWN_WORKLOADS} more Workloads: --json has all", "dim"))


def workload_cells(workload: WorkloadVerdict) -> list[str]:
    before = workload.engine_us if workload.engine_us is not None else _median(workload.reference)
    return [
        f"{workload.share:.1%}",
        _us(_median(workload.time)),
        _spread(workload.time),
        _us(before),
        f"{workload.speedup:.2f}x" if workload.speedup is not None else "–",
        _us(workload.floor_us),
        f"{workload.times_floor:.2f}" if workload.times_floor is not None else "–",
        workload.limited_by or "–",
        printable(sizes_of(workload)),
        workload.status if workload.status == "PASSED" else printable(f"{workload.status}: {workload.reason or ''}"),
    ]


def _median(spread: Spread | None) -> float | None:
    return spread.median_us if spread else None


def _us(us: float | None) -> str:
    return duration(us) if us is not None else "–"


def _spread(spread: Spread | None) -> str:
    """Half of what lies between the quartiles, of the median."""
    if spread is None or not spread.median_us:
        return "–"
    return f"±{(spread.q3_us - spread.q1_us) / 2 / spread.median_us:.1%}"


def closing_lines(verdict: Verdict) -> Iterator[Text]:
    for phase, gain in verdict.gain.items():
        if phase == ALL_PHASES or len(verdict.gain) > 2:
            yield Text(describe_gain(phase, gain, verdict.baseline), "bold")
    if verdict.held_out is not None:
        yield Text(describe_held_out(verdict.held_out))
    for note in verdict.notes:
        yield Text(printable(note), "yellow")
    for step in verdict.next:
        yield Text(printable(f"next: {step}"))


def describe_gain(phase: str, gain: Gain, baseline: str) -> str:
    """`1.31 times as fast as the engine's kernels: saves 12.1 ms of 51.0 ms, 0.8 % of all that was recorded`."""
    where = "" if phase == ALL_PHASES else f"in {phase}: "
    speedup = f"{gain.speedup:.2f} times as fast as {baseline}: " if gain.speedup else ""
    verb = "saves" if gain.saved_us >= 0 else "costs"
    share = f", {abs(gain.share):.2%} of all GPU time measured" if gain.share is not None else ""
    return f"{where}{speedup}{verb} {duration(abs(gain.saved_us))} of {duration(gain.before_us)}{share}"


def describe_held_out(held_out: HeldOutVerdict) -> str:
    if not held_out.judged:
        return f"held out: {held_out.workloads} Workloads, none judged" + (
            f" ({held_out.note})" if held_out.note else ""
        )
    speedup = f", {held_out.speedup:.2f} times as fast as the references" if held_out.speedup else ""
    return f"held out: {held_out.passed} of {held_out.workloads} Workloads passed{speedup}"

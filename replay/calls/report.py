"""The output of `kcap replay`: tables of GPU and host times, then what was skipped and what failed."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.calls.results import Results, Row, total_count, total_us
from kcap.replay.jobs import CallJob
from kcap.schemas.results.measurement import AT_FLOOR, DISTURBED, MADE_UP, NOTHING, SLOWED, Status
from kcap.schemas.validation.report import printable
from kcap.show.console import MAX_FLOOR_FACTOR, floor_factor, plain_table, print_table
from kcap.system.worker_process import Environment

HOST_ROWS = 10
REASONS = 12
SECTIONS = {False: "GPU time", True: "host time (not part of the GPU time)"}


def print_tables(out: Console, results: Results, environment: Environment, rows: int) -> None:
    """Print the whole report: both tables, each by total time, then the caveats."""
    out.print(Text(device_title(environment), style="bold"))
    mixed = bool(results.timed(host=False))
    for host in (False, True):
        if timed := results.timed(host):
            print_section(out, timed, min(rows, HOST_ROWS) if host and mixed else rows, SECTIONS[host] if mixed else "")
    for line in summary_lines(results):
        out.print(line)


def print_section(out: Console, timed: list[Row], rows: int, name: str) -> None:
    """One table of rows that share a clock."""
    total = total_us(timed)
    if name:
        out.print(Text(f"\n{name}: {duration(total)}", "bold"))
    print_table(out, results_table(timed[:rows], total))
    if rest := timed[rows:]:
        out.print(Text(f"{len(rest)} more rows, {percent(total_us(rest), total)}: --json has all", "dim"))


def device_title(environment: Environment) -> str:
    parts = [str(environment.get("device_name") or environment.get("device"))]
    parts += [f"torch {environment['torch']}"] if environment.get("torch") else []
    parts += [f"driver {environment['driver']}"] if environment.get("driver") else []
    parts += [f"{environment['threads']} threads"] if environment.get("threads") else []
    return " · ".join(parts)


def results_table(rows: list[Row], total: float) -> Table:
    """Numbers on the left; kernel and arguments last, cut where the line ends."""
    floors = any(row.times_floor for row in rows)
    numbers = ("count × time", "share", "time", *(["× floor"] if floors else []), "count")
    table = plain_table(numbers, ("phases", "clock", "kernel"))
    phases = {phase for row in rows for phase in row.job.counts}
    for row in rows:
        table.add_row(*row_cells(row, total, phases, floors))
    return table


def row_cells(row: Row, total: float, phases: set[str], floors: bool) -> Iterator[Text]:
    yield Text(duration(row.total_us or 0), "bold")
    yield Text(percent(row.total_us or 0, total))
    yield Text(duration(row.time_us or 0))
    if floors:
        yield Text(floor_factor(row.times_floor))
    yield Text(f"{row.job.count:,}")
    yield Text("all" if len(phases) > 1 and set(row.job.counts) == phases else ",".join(row.job.counts))
    yield Text(clock_marks(row), "dim")
    yield Text.assemble(printable(row.job.name), ("  " + printable(row.job.arguments), "dim"))


def clock_marks(row: Row) -> str:
    """How it was timed: `graph, cold`; `none` where the GPU was given nothing to do."""
    first = row.timed
    if first is None or first.method is None:
        return ""
    return first.method if first.method in ("none", "host") else f"{first.method}, {first.cache}"


def duration(microseconds: float) -> str:
    """Three digits and a unit: `4.18 µs`, `1.25 ms`."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.2f} µs"


def summary_lines(results: Results) -> Iterator[Text]:
    total, replayed = results.count, results.count_of("ok")
    times = [f"{duration(us)} {name}" for name, us in (("GPU", results.gpu_us), ("host", results.host_us)) if us]
    yield Text(
        f"\nreplayed {replayed:,} of {total:,} invocations ({percent(replayed, total)}),"
        f" {len(results.of('ok')):,} of {len(results.rows):,} distinct calls: {', '.join(times)}",
        "bold",
    )
    yield from note_lines(results)
    styles: dict[Status, str] = {"skipped": "yellow", "failed": "bold red"}
    for status, style in styles.items():
        reasons = results.reasons(status)
        for reason, calls, count in reasons[:REASONS]:
            what = f"{invocations(count)} ({percent(count, total)})" if count else "timed on others of their Samples"
            yield Text(f"{status}: {printable(reason)}: {distinct(calls)}, {what}", style)
        if len(reasons) > REASONS:
            rest = sum(count for _, _, count in reasons[REASONS:])
            yield Text(
                f"{status}: {len(reasons) - REASONS} more reasons, {invocations(rest)} ({percent(rest, total)})", style
            )


def note_lines(results: Results) -> Iterator[Text]:
    """Caveats of the times."""
    if rows := [row for row in results.rows if (row.times_floor or 0) > MAX_FLOOR_FACTOR]:
        yield Text(
            f"× floor says nothing (…) of {distinct(len(rows))} that took over {MAX_FLOOR_FACTOR} times their floor:"
            " so little work that only the overhead of a call was timed, or the machine was busy",
            "dim",
        )
    if rows := [row for row in results.rows if isinstance(row.job, CallJob) and row.job.call.shapes > 1 and row.timed]:
        count = invocations(sum(row.job.count for row in rows))
        yield Text(f"of several sizes, and timed at that of the first: {distinct(len(rows))}, {count}", "yellow")
    if rows := results.noted(MADE_UP):
        yield Text(f"{MADE_UP} blobs: index inputs of {len(rows)} Workloads, valid but not those recorded", "yellow")
    if rows := [row for row in results.rows if row.timed and row.timed.ranks]:
        sizes = ", ".join(str(size) for size in sorted({row.timed.ranks or 0 for row in rows if row.timed}))
        waited = fmean(m.waited_us for row in rows for m in row.measurements if m.waited_us is not None)
        yield Text(
            f"collectives, by groups of {sizes} processes: {distinct(len(rows))}, timed from the arrival of the last"
            f" rank; the others' wait for it ({duration(waited)} a sample) is not in the times",
            "dim",
        )
    if rows := results.noted(NOTHING):
        counted = f"{distinct(len(rows))}, {invocations(total_count(rows))}"
        yield Text(f"{NOTHING}: {counted} (no elements, or no work)", "dim")
    if rows := results.noted(AT_FLOOR):
        floor = max(m.floor_us or 0 for row in rows for m in row.measurements)
        yield Text(f"{AT_FLOOR} ({duration(floor)} at most): {distinct(len(rows))}, {duration(total_us(rows))}", "dim")
    if rows := results.noted(SLOWED):
        yield Text(f"{SLOWED} (power, heat) for {distinct(len(rows))}: {duration(total_us(rows))}", "yellow")
    if rows := results.noted(DISTURBED):
        yield Text(f"this machine was busy: {DISTURBED} of {distinct(len(rows))}, whose times are too long", "yellow")


def distinct(calls: int) -> str:
    return f"{calls:,} distinct call{'' if calls == 1 else 's'}"


def invocations(count: int) -> str:
    return f"{count:,} invocation{'' if count == 1 else 's'}"


def percent(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total else "0 %"

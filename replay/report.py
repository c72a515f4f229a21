"""How `kcap replay` looks: the table of times, then what was skipped and what failed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.replay.results import Results, Row, counted
from kcap.schemas.measurement import DISTURBED
from kcap.schemas.signature import signature

PIPED_WIDTH = 200
LONGEST_SIGNATURE = 90
REASONS = 12


def console() -> Console:
    """Standard output; as wide as the terminal, or wide enough to keep a row on a line where there is none."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def show(out: Console, results: Results, environment: dict[str, object], rows: int) -> None:
    """Print the whole report."""
    out.print(Text(title(environment), style="bold"))
    timed = results.timed()
    if timed:
        out.print(table(timed[:rows], results.total_us))
    if len(timed) > rows:
        out.print(Text(f"{len(timed) - rows} more rows: --rows {len(timed)}", "dim"))
    for line in summary(results):
        out.print(line)


def title(environment: dict[str, object]) -> str:
    parts = [str(environment.get("device_name") or environment.get("device"))]
    parts += [f"torch {environment['torch']}"] if environment.get("torch") else []
    parts += [f"driver {environment['driver']}"] if environment.get("driver") else []
    parts += [f"{environment['threads']} threads"] if environment.get("threads") else []
    return " · ".join(parts)


def table(rows: list[Row], total_us: float) -> Table:
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    out.add_column("kernel", overflow="fold")
    out.add_column("arguments", overflow="fold")
    for name in ("phases", "count", "time", "count × time", "share", "clock"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(*cells(row, total_us))
    return out


def cells(row: Row, total_us: float) -> Iterator[Text]:
    text = signature(row.job.call.args)
    yield Text(row.job.call.operator)
    yield Text(text if len(text) <= LONGEST_SIGNATURE else text[: LONGEST_SIGNATURE - 1] + "…")
    yield Text(",".join(row.job.counts))
    yield Text(f"{row.job.count:,}")
    yield Text(duration(row.time_us or 0))
    yield Text(duration(row.total_us or 0), "bold")
    yield Text(f"{(row.total_us or 0) / total_us:.1%}" if total_us else "")
    first = next(m for m in row.measurements if m.median_us is not None)
    yield Text(f"{first.method}, {first.cache}", "dim")


def duration(microseconds: float) -> str:
    """Three digits and a unit: `4.18 µs`, `1.25 ms`."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.2f} µs"


def summary(results: Results) -> Iterator[Text]:
    total = results.count
    done = counted(results.of("ok"))
    yield Text(
        f"replayed {done:,} of {total:,} kernel counts ({share(done, total)}): {duration(results.total_us)}", "bold"
    )
    if disturbed := sum(any(DISTURBED in m.notes for m in row.measurements) for row in results.rows):
        yield Text(f"this machine was busy: {DISTURBED} of {disturbed} calls, whose times are too long", "yellow")
    for status, style in (("skipped", "yellow"), ("failed", "bold red")):
        reasons = results.reasons(status)
        for reason, calls, count in reasons[:REASONS]:
            yield Text(f"{status}: {reason}: {calls} calls, {count:,} counts ({share(count, total)})", style)
        if len(reasons) > REASONS:
            rest = sum(count for _, _, count in reasons[REASONS:])
            yield Text(
                f"{status}: {len(reasons) - REASONS} more reasons, {rest:,} counts ({share(rest, total)})", style
            )


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"

"""How the end of `kcap bench` looks: a row a Solution, what the best save together, and what was not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.bench.run.summary.score import Saving, Score, score_key
from kcap.bench.run.summary.summary import Summary
from kcap.replay.calls.report import duration
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.results.bench_run import Machine
from kcap.schemas.results.outcome import WrongElements
from kcap.schemas.validation.report import printable

SHOWN = 12
ROWS = 60
GAP = 2  # blanks between columns
LEAST_REASON = 32  # columns; with fewer, reasons are printed below the table
COLUMNS = ("passed", "geomean", "by count", "±", "saves")


def print_summary(out: Console, summary: Summary) -> None:
    """Print the table and the lines below it."""
    out.print(Text(title(summary.machine), "bold"))
    reasons = print_scores(out, summary) if summary.scores else []
    if len(summary.scores) > ROWS:
        out.print(Text(f"{len(summary.scores) - ROWS} more Solutions: --json has all", "dim"))
    for line in (*reasons, *lines(summary)):
        out.print(line)


def title(machine: Machine) -> str:
    parts = [", ".join(machine.devices), f"torch {machine.torch}" if machine.torch else ""]
    parts += [f"driver {machine.driver}" if machine.driver else ""]
    return " · ".join(part for part in parts if part)


def print_scores(out: Console, summary: Summary) -> list[Text]:
    """A line for each Definition, its Solutions below; what the table has no room for: the reasons of failures."""
    scores = summary.scores[:ROWS]
    names = [text for score in scores for text in (printable(score.definition), f"  {printable(score.name)}")]
    rows = [_cells(summary, score) for score in scores]
    widths = [
        max(map(len, column)) + GAP for column in zip(COLUMNS, *([str(c) for c in row] for row in rows), strict=True)
    ]
    room = out.width - sum(widths) - GAP
    width = min(max(map(len, names)), room)
    inside = room - width >= LEAST_REASON
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    table.add_column("Definition and Solution", width=max(width, len("Definition")), no_wrap=True, overflow="ellipsis")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    if inside:
        table.add_column("why not", no_wrap=True, overflow="ellipsis", max_width=room - width)
    for number, (score, row) in enumerate(zip(scores, rows, strict=True)):
        if number == 0 or scores[number - 1].definition != score.definition:
            table.add_row(Text(printable(score.definition), "bold"))
        table.add_row(f"  {printable(score.name)}", *row, *([Text(_against(score), "dim")] if inside else []))
    out.print(table)
    failed = [] if inside else [score for score in scores if _against(score)]
    return [Text(f"{printable(score_key(score))}: {_against(score)}", "dim") for score in failed]


def _cells(summary: Summary, score: Score) -> list[Text]:
    saving = summary.saved[score_key(score)].get(ALL_PHASES)
    passed = Text(f"{len(score.passed)}/{len(score.workloads)}", "green" if score.ranked else "yellow")
    saves = _signed(saving.saved_us) if saving else "–"
    spread = "–" if score.spread is None else f"{score.spread:.0%}"
    return [passed, *map(Text, (_times(score.geometric_mean), _times(score.weighted), spread, saves))]


def lines(summary: Summary) -> Iterator[Text]:
    """What is saved, then what was not judged."""
    best = summary.best
    who = f"{score_key(best[0])} saves" if len(best) == 1 else f"the best of {len(best)} Definitions save"
    for phase, saving in _told_phases(summary.whole):
        yield Text(f"{printable(who)} {_of_phase(phase, saving, summary.baseline.title)}", "bold")
    if best and not summary.baseline.totals:
        yield Text("which share of the whole that is, is not known without --measurements FILE", "dim")
    for note in summary.notes:
        yield Text(note, "yellow")
    for reason, count in Counter(_not_judged(summary.scores)).most_common(SHOWN):
        yield Text(f"not judged: {printable(reason)}: {count} Workloads", "yellow")
    for refused in summary.refused[:SHOWN]:
        yield Text(f"refused: {printable(refused.file)}: {printable(refused.reason)}", "yellow")
    if len(summary.refused) > SHOWN:
        yield Text(f"refused: {len(summary.refused) - SHOWN} more files: bench.json has all", "yellow")


def _told_phases(whole: Mapping[str, Saving]) -> list[tuple[str, Saving]]:
    """Each phase and all together, unless that says the same twice."""
    if len(whole) == 2 and whole[ALL_PHASES] in [saving for phase, saving in whole.items() if phase != ALL_PHASES]:
        return [(phase, saving) for phase, saving in whole.items() if (phase == ALL_PHASES) is ("other" in whole)]
    return list(whole.items())


def _of_phase(phase: str, saving: Saving, of: str) -> str:
    """`4.1 % of decode time (12.3 ms of 300.1 ms)`; or `3.2 ms of the 9.8 ms that … take in decode`."""
    if saving.share is None:
        where = "" if phase == ALL_PHASES else f" in {phase}"
        return f"{duration(saving.saved_us)} of the {duration(saving.before_us)} that {of} take{where}"
    time = "the time" if phase == ALL_PHASES else f"{phase} time"
    return f"{saving.share:.1%} of {time} ({_signed(saving.saved_us)} of {duration(saving.total_us or 0)}, {of})"


def _not_judged(scores: Sequence[Score]) -> Iterator[str]:
    for score in scores:
        yield from (outcome.reason or "" for outcome in score.outcomes.values() if outcome.status == "NOT_JUDGED")
        yield from ["not reached"] * (len(score.workloads) - len(score.outcomes))


def _against(score: Score) -> str:
    """`TIMEOUT 2, RUNTIME_ERROR 1: took longer than 60 s`, the reason being the gravest."""
    missing = len(score.workloads) - len(score.outcomes)
    counts = {**score.statuses, **({"missing": missing} if missing else {})}
    statuses = ", ".join(f"{status} {n}" for status, n in counts.items() if status != "PASSED")
    reason = score.worst.reason if score.worst else None
    if score.worst and score.worst.status == "INCORRECT_NUMERICAL" and score.worst.wrong:
        reason = describe_wrong(score.worst.wrong[0])
    return printable(f"{statuses}: {reason}" if reason else statuses)


def describe_wrong(wrong: WrongElements) -> str:
    """`y[3, 7] is 1.5, expected 1 ± 0.0002; 64 of 4,096 are wrong: row 3 alone of 64`."""
    place = f"{wrong.output}[{', '.join(map(str, wrong.index))}]"
    worst = f"{place} is {_number(wrong.found)}, expected {_number(wrong.expected)}"
    worst += f" ± {wrong.tolerance:.3g}" if wrong.tolerance else ""
    if not wrong.wrong:
        return f"{worst}; {wrong.where}"
    nans = f", {wrong.not_a_number:,} of them nan" if wrong.not_a_number else ""
    return f"{worst}; {wrong.wrong:,} of {wrong.total:,} are wrong{nans}: {wrong.where}"


def _number(value: float | int | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}×"


def _signed(us: float) -> str:
    return f"-{duration(-us)}" if us < 0 else duration(us)

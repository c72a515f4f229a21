"""How the end of `kcap bench` looks: a row a Solution, what the best save together, and what was not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kcap.bench.run.output import Machine
from kcap.bench.summary.score import ALL_PHASES, Saving, Score, score_key
from kcap.bench.summary.summary import Summary
from kcap.replay.calls.report import duration
from kcap.schemas.validation.report import printable

SHOWN = 12
ROWS = 60
COLUMNS = ("passed", "geomean", "by count", "saves")


def print_summary(out: Console, summary: Summary) -> None:
    """Print the table and the lines below it."""
    out.print(Text(title(summary.machine), "bold"))
    if summary.scores:
        out.print(table(summary))
    if len(summary.scores) > ROWS:
        out.print(Text(f"{len(summary.scores) - ROWS} more Solutions: --json has all", "dim"))
    for line in lines(summary):
        out.print(line)


def title(machine: Machine) -> str:
    parts = [", ".join(machine.devices), f"torch {machine.torch}" if machine.torch else ""]
    parts += [f"driver {machine.driver}" if machine.driver else ""]
    return " · ".join(part for part in parts if part)


def table(summary: Summary) -> Table:
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("Definition and Solution", no_wrap=True, overflow="ellipsis", ratio=2)
    out.add_column("why not", no_wrap=True, overflow="ellipsis", ratio=3)
    for score in summary.scores[:ROWS]:
        saving = summary.saved[score_key(score)].get(ALL_PHASES)
        passed = f"{len(score.passed)}/{len(score.workloads)}"
        out.add_row(
            Text(passed, "green" if score.ranked else "yellow"),
            _times(score.geometric_mean),
            _times(score.weighted),
            _signed(saving.saved_us) if saving else "–",
            Text.assemble(printable(score.definition), (f"  {printable(score.name)}", "bold")),
            Text(_against(score), "dim"),
        )
    return out


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
    """`4.1 % of decode time (12.3 ms of 300.1 ms)`."""
    time = "the time" if phase == ALL_PHASES else f"{phase} time"
    if saving.share is None:
        return f"{duration(saving.saved_us)} of {time} that {of} take: {duration(saving.before_us)}"
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
    return printable(f"{statuses}: {reason}" if reason else statuses)


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}×"


def _signed(us: float) -> str:
    return f"-{duration(-us)}" if us < 0 else duration(us)

"""The folder that `kcap bench` writes: made, replaced or resumed, and written by one run at a time.

bench.json says what was judged on what: by it an output is known again when it is resumed. outcomes.jsonl holds each
Outcome as a line, written when it is there, so that what a kill leaves can be finished.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kcap.errors import CallError
from kcap.schemas.files.jsonfile import dump_json, read_json
from kcap.schemas.results import outcome as outcomes_file
from kcap.schemas.results.bench_run import RUN_ADAPTER, RUN_FILE, Machine, RunRecord
from kcap.schemas.results.outcome import Outcome
from kcap.system.output import OutputKind, check_output, write_atomically

BENCH = OutputKind((RUN_FILE,), "not made by kcap bench, and is neither replaced nor resumed: choose another -o")


def check_bench_output(output: Path, sources: Sequence[Path], resume: bool, force: bool) -> None:
    """CallError if `output` cannot be written as asked, holds one of `sources`, or lies in a Recording among them."""
    if resume and force:
        raise CallError("--resume keeps what is there and --force replaces it: pass one of them")
    recordings = [source for source in sources if (source / "recording.json").exists()]
    empty = output.is_dir() and not any(output.iterdir())
    option = "--resume to finish it, or --force"
    check_output(output, resume or force or empty, option, BENCH, sources=recordings, enclosing=sources)


@contextmanager
def owned(output: Path, force: bool) -> Iterator[None]:
    """`output` is there, with `force` empty, and no other run writes it; CallError if one does."""
    output.mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, output)
        if force:
            _empty(output)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CallError(f"{output}: another kcap bench writes it: wait for it, or choose another -o") from None


def _empty(output: Path) -> None:
    """bench.json, which says whose the folder is, goes last."""
    for path in sorted(output.iterdir(), key=lambda path: path.name == RUN_FILE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


TIME_LIMITS = ("timeout", "build_timeout")  # options of time


def read_run(output: Path) -> RunRecord:
    """The run that `output` holds; FormatError if its bench.json is none."""
    return read_json(output / RUN_FILE, RUN_ADAPTER)


def write_run(output: Path, run: RunRecord) -> None:
    """Put bench.json in place at once."""
    write_atomically(output / RUN_FILE, dump_json(run.model_dump(mode="json")))


def check_same_run(output: Path, before: RunRecord, now: RunRecord) -> None:
    """CallError naming both where `now` would add Outcomes to `output` that cannot stand beside those of `before`."""
    if before.identity != now.identity:
        raise CallError(
            f"{output}: holds Outcomes on {_describe_path(before)}, "
            f"and this is {_describe_path(now)}: choose another -o"
        )
    for name in sorted(before.blobs.keys() & now.blobs.keys()):
        if before.blobs[name] != now.blobs[name]:
            raise CallError(f"{output}: holds Outcomes on other blobs of {name} than there are now: choose another -o")
    for what in ("device", "kcap", "threads"):
        _check_equal(output, what, getattr(before, what), getattr(now, what))
    seconds = before.options.get("seconds")
    _check_equal(
        output, "--seconds", seconds, now.options.get("seconds"), f"pass --seconds {seconds}, or choose another -o"
    )


def allows_more_time(before: RunRecord, now: RunRecord) -> bool:
    """Whether a Solution gets more time than it did in `before`."""
    return any(now.options[name] > before.options[name] for name in TIME_LIMITS if name in before.options)


def check_machine(output: Path, before: Machine, now: Machine) -> None:
    """The same for the machine, where one is known already."""
    if not before.devices:
        return
    _check_equal(output, "torch", before.torch, now.torch)
    if new := sorted(set(now.devices) - set(before.devices)):
        _check_equal(output, "device", ", ".join(before.devices), ", ".join(new))


def _describe_path(run: RunRecord) -> str:
    return f"{run.path} (sha256 {run.identity[:12]})"


def _check_equal(output: Path, what: str, before: Any, now: Any, fix: str = "choose another -o") -> None:
    if before != now:
        raise CallError(f"{output}: was judged with {what} {before}, and this is {now}: {fix}")


OUTCOMES_FILE = "outcomes.jsonl"
SolutionKey: TypeAlias = tuple[str, str, str]  # definition, author, solution


@dataclass(frozen=True)
class KeptOutcomes:
    """What an output holds already. `torn`: its last line broke off, and is gone."""

    outcomes: list[Outcome]
    torn: bool = False


def solution_key(outcome: Outcome) -> SolutionKey:
    """Whose Outcome it is."""
    return outcome.definition, outcome.author, outcome.solution


def keep_outcomes(output: Path, valid: Callable[[Outcome], bool]) -> KeptOutcomes:
    """The Outcomes in `output` that are `valid`, the last of each Workload; the others are removed from the file.

    FormatError for a line that is no Outcome, unless it is the last and broke off.
    """
    path = output / OUTCOMES_FILE
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_atomically(path, whole)
    read = list(outcomes_file.read_outcomes(path)) if whole else []
    latest = {(*solution_key(outcome), outcome.workload): outcome for outcome in read if valid(outcome)}
    if len(latest) != len(read):
        write_atomically(path, b"".join(outcome.line() for outcome in latest.values()))
    return KeptOutcomes(list(latest.values()), whole != content)


@contextmanager
def outcome_writer(output: Path) -> Iterator[Callable[[Outcome], object]]:
    """A function that adds an Outcome to the file, in one write."""
    with (output / OUTCOMES_FILE).open("ab", buffering=0) as file:
        yield lambda outcome: file.write(outcome.line())

"""How far five runs of `kcap replay` differ: of every kernel, the spread of its medians, by how long it lasts.

    python scripts/gpu/repeatability.py RECORDING [--runs 5] [--limit SECONDS] [-o DIR] [-- OPTIONS OF kcap replay]

Each run is a process of its own. The spread is the highest median less the lowest, over the middle one. Prints the
kernels that differ most, then a short table: of each class of durations the worst and how many are within its bound,
how many kernels some run lacks, and the time of a run, its start included. DIR keeps every run's measurements. No run
is begun that might not end within the limit, and none after one that failed. Exits with 1 where a kernel of 2 µs or
more is out of its bound or lacking, where there are fewer runs than asked for, or a run takes over a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marks import mark
from spread import kernels, table, worst

from kcap.errors import DONE, PARTIAL
from kcap.schemas.results.measurement import read_measurements

LONGEST_RUN_S = 60.0


@dataclass(frozen=True)
class Run:
    """One run of the command, which wrote `output`; `failure` says why it is none."""

    output: Path
    seconds: float
    failure: str = ""


def replay(recording: Path, output: Path, options: Sequence[str]) -> Run:
    output.unlink(missing_ok=True)  # of an earlier call of this script
    began = time.perf_counter()
    command = [sys.executable, "-m", "kcap", "replay", str(recording), "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    print(f"$ {' '.join(command)}   ({seconds:.1f} s, status {done.returncode})", flush=True)
    if done.returncode in (DONE, PARTIAL) and output.is_file():
        return Run(output, seconds)
    said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
    return Run(output, seconds, f"status {done.returncode}: {said[-1]}")


def runs(recording: Path, folder: Path, asked: int, limit: float, options: Sequence[str]) -> tuple[list[Run], str]:
    """Those that ended well, and why they are fewer than `asked`: one failed, or `limit` seconds are over."""
    ended: list[Run] = []
    until = time.monotonic() + limit
    while len(ended) < asked:
        if time.monotonic() + max((run.seconds for run in ended), default=0.0) >= until:
            return ended, "the limit was over"
        run = replay(recording, folder / f"run{len(ended)}.jsonl", options)
        if run.failure:
            return ended, f"run {len(ended) + 1} failed, {run.failure}"
        ended.append(run)
    return ended, ""


def times(seconds: Sequence[float], asked: int, why: str) -> list[str]:
    """The lines about the runs: how many there are, and how long they took."""
    lines = [f"{mark(len(seconds) == asked)} runs: {len(seconds)} of {asked}" + (f": {why}" if why else "")]
    if seconds:
        longest = f"{max(seconds):.1f} s at most, {min(seconds):.1f} s at least"
        lines.append(f"{mark(max(seconds) <= LONGEST_RUN_S)} a run, start included: {longest}")
    return lines


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """This script's arguments, and those after the first `--`: argparse takes none there once it had its positional."""
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="two or more  [default: 5]")
    parser.add_argument("--limit", type=float, default=3600, help="seconds  [default: 3600]")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(words)
    if args.runs < 2:
        parser.error(f"--runs {args.runs}: fewer than two runs compare nothing")
    return args


def main() -> None:
    words, options = split(sys.argv[1:])
    args = arguments(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ended, why = runs(args.recording, folder, args.runs, args.limit, ["--force", *options])
        found, lacking = kernels(list(read_measurements(run.output)) for run in ended)
    lines = [*(table(found, lacking) if len(ended) > 1 else []), *times([run.seconds for run in ended], args.runs, why)]
    print("\nspread     time       clock            kernel", *worst(found), "", *lines, sep="\n")
    sys.exit(any(line.startswith("BAD") for line in lines))


if __name__ == "__main__":
    main()

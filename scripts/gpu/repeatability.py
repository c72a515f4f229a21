"""How far five runs of `kcap replay` differ: of every kernel, the spread of its medians, by how long it lasts.

    python scripts/gpu/repeatability.py RECORDING [--runs 5] [--limit SECONDS] [-o DIR] [-- OPTIONS OF kcap replay]

Each run is a process of its own. The spread is the highest median less the lowest, over the middle one. Prints the
kernels that differ most, then a short table: of each class of durations the worst and how many are within its bound,
and the time of a run, its start included. DIR keeps every run's measurements. No run is begun that might not end within
the limit. Exits with 1 where a kernel of 2 µs or more is out of its bound, or a run takes over a minute.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kcap.schemas.measurement import Measurement, read

LONGEST_RUN_S = 60.0
WORST = 15  # rows


@dataclass(frozen=True)
class Class:
    """Kernels of at least `least` µs and of no longer class; `bound`: the spread allowed, None: it is only told."""

    name: str
    least: float
    bound: float | None


CLASSES = (Class("over 5 µs", 5.0, 0.01), Class("2 to 5 µs", 2.0, 0.03), Class("under 2 µs", 0.0, None))


@dataclass(frozen=True)
class Kernel:
    """One Call on one Sample (or Workload): its median in each run, in µs."""

    name: str
    method: str
    medians: tuple[float, ...]

    @property
    def us(self) -> float:
        return statistics.median(self.medians)

    @property
    def spread(self) -> float:
        return (max(self.medians) - min(self.medians)) / self.us

    @property
    def of(self) -> Class:
        return next(one for one in CLASSES if self.us >= one.least)

    @property
    def holds(self) -> bool:
        return self.of.bound is None or self.spread <= self.of.bound


def kernels(runs: Iterable[Iterable[Measurement]]) -> list[Kernel]:
    """Those that every run timed on the GPU."""
    found = [{place(one): one for one in run if one.median_us and one.method in ("graph", "events")} for run in runs]
    common = [key for key in found[0] if all(key in run for run in found)]
    return [_kernel([run[key] for run in found]) for key in common]


def place(one: Measurement) -> tuple[int | str | None, int | None]:
    return (one.workload if one.call is None else one.call), one.sample


def _kernel(ones: list[Measurement]) -> Kernel:
    first = ones[0]
    name = f"{first.operator} (call {first.call}, sample {first.sample})"
    return Kernel(name, f"{first.method}, {first.cache}", tuple(one.median_us or 0.0 for one in ones))


def replay(recording: Path, output: Path, options: list[str]) -> float:
    """Seconds of one run of the command, which writes `output`; exits where it failed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "kcap", "replay", str(recording), "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    print(f"$ {' '.join(command)}   ({seconds:.1f} s, status {done.returncode})", flush=True)
    if not output.is_file():
        sys.exit(done.stderr)
    return seconds


def runs(recording: Path, folder: Path, most: int, limit: float, options: list[str]) -> tuple[list[Path], list[float]]:
    """What each run wrote, and its seconds; fewer than `most` where `limit` seconds are over."""
    outputs: list[Path] = []
    seconds: list[float] = []
    until = time.monotonic() + limit
    while len(outputs) < most and time.monotonic() + max(seconds, default=0) < until:
        outputs.append(folder / f"run{len(outputs)}.jsonl")
        seconds.append(replay(recording, outputs[-1], ["--force", *options]))
    return outputs, seconds


def worst(found: list[Kernel]) -> list[str]:
    """The kernels that differ most, one a line."""
    rows = sorted(found, key=lambda one: (one.holds, -one.spread))[:WORST]
    return [f"{one.spread:7.2%}  {one.us:9.2f} µs  {one.method:16} {one.name}" for one in rows]


def table(found: list[Kernel], seconds: list[float]) -> list[str]:
    """The short table: a line for each class, and one for the time."""
    lines = []
    for one in CLASSES:
        those = [kernel for kernel in found if kernel.of == one]
        if those:
            inside = sum(kernel.holds for kernel in those)
            bound = f"within {one.bound:.0%}: {inside} of {len(those)}" if one.bound else f"{len(those)} kernels"
            most = max(kernel.spread for kernel in those)
            middle = statistics.median(kernel.spread for kernel in those)
            lines.append(f"{mark(inside == len(those))} {one.name}: {bound}, worst {most:.2%}, median {middle:.2%}")
    quick = max(seconds) <= LONGEST_RUN_S
    times = f"{max(seconds):.1f} s at most, {min(seconds):.1f} s at least"
    return [*lines, f"{mark(quick)} a run of {len(seconds)}, start included: {times}"]


def mark(passed: bool) -> str:
    return "ok " if passed else "BAD"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=3600, help="seconds  [default: 3600]")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("options", nargs="*", help="of kcap replay, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outputs, seconds = runs(args.recording, folder, args.runs, args.limit, args.options)
        found = kernels(list(read(output)) for output in outputs)
    if not found:
        sys.exit("no kernel was timed on a GPU in every run")
    lines = table(found, seconds)
    print("\nspread     time       clock            kernel", *worst(found), "", *lines, sep="\n")
    sys.exit(any(line.startswith("BAD") for line in lines))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How true the judge's times are: Solutions that measure themselves, by `kcap bench` and by their own stopwatch.

    python scripts/stopwatch.py [--device cpu] [--seconds 0.3]

Each works on fresh inputs of 256 KiB for about so many microseconds, and notes by a clock of its own how long each
call took. What the judge says of it is held against the mean of the latest notes. Prints a table: the two times, their
ratio, and what the way to the process and back is of the judge's. On a busy machine the ratio spreads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from judge_throughput import RELU

from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import RandomInput, Workload
from kcap.schemas.results import outcome as outcomes_file

ROWS = 1024
LONGEST = (20, 50, 100, 300, 1000, 10_000)  # microseconds
SOLUTION = """# definition: relu
import statistics, time

import torch

NOTED, LAST = [], [0]


def run(x):
    began = time.perf_counter_ns()
    out = torch.relu(x)
    while time.perf_counter_ns() - began < {us} * 1000:
        pass
    NOTED.append(time.perf_counter_ns() - began)
    if began - LAST[0] > 5e8:
        print("mean", statistics.fmean(NOTED[-1000:]) / 1000, flush=True)
        LAST[0] = began
    return out
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", default="0.3")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_problem(root)
        words = ("bench", root / "dataset", "--solutions", root / "solutions", "-o", root / "out", "--trust")
        command = [sys.executable, "-m", "kcap", *map(str, words), "--device", given.device, "--seconds", given.seconds]
        done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        print("    stopwatch      judge     ratio   way")
        for found in sorted(outcomes_file.read_outcomes(root / "out" / "outcomes.jsonl"), key=lambda one: one.solution):
            noted = [float(line.split()[1]) for line in found.log.splitlines() if line.startswith("mean ")]
            if found.time is None or not noted:
                print(f"{found.solution}: {found.status} {found.reason}")
                continue
            judged, way = found.time.median_us, (found.time.way_us or 0.0) / found.time.median_us
            print(f"{noted[-1]:10.1f} us {judged:8.1f} us {judged / noted[-1]:8.3f} {way:6.1%}")


def write_problem(root: Path) -> None:
    """A dataset of one Definition, and a Solution for each time."""
    workload = Workload(uuid="w", axes={"m": ROWS}, inputs={"x": RandomInput()})
    write_dataset(root / "dataset", [RELU], {RELU.name: [workload]}, {})
    (root / "solutions").mkdir()
    for us in LONGEST:
        (root / "solutions" / f"takes_{us:05}.py").write_text(SOLUTION.format(us=us))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How fast `kcap bench` judges: small Solutions on small Workloads, and that nothing is left of them.

python scripts/judge_throughput.py [--solutions 100] [--workloads 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor, RandomInput, Workload
from kcap.schemas.results import outcome as outcomes_file

MATRIX = DefinitionTensor(shape=["m", "n"], dtype="float32")
RELU = Definition(
    name="relu",
    op_type="activation",
    axes={"m": AxisVar(), "n": AxisConst(value=64)},
    inputs={"x": MATRIX},
    outputs={"y": MATRIX},
    reference="import torch\n\n\ndef run(x):\n    return torch.relu(x)\n",
)
PARTIAL = 3  # the exit code of a run in which some did not pass
SOLUTION = """# definition: {definition}
import torch


def run(x):
    return {body}
"""
BODIES = (
    "torch.relu(x)",
    "x.clamp(min=0)",
    "x * (x > 0)",
    "torch.maximum(x, torch.zeros_like(x))",
    "(x + x.abs()) / 2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solutions", type=int, default=100)
    parser.add_argument("--workloads", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_problem(root, given.solutions, given.workloads)
        before = left()
        began = time.monotonic()
        judge(root)
        seconds = time.monotonic() - began
        report(root, seconds, before)


def write_problem(root: Path, solutions: int, workloads: int) -> None:
    """A dataset of one Definition, and Solutions of it."""
    made = [Workload(uuid=f"w{i}", axes={"m": 16 * (i + 1)}, inputs={"x": RandomInput()}) for i in range(workloads)]
    write_dataset(root / "dataset", [RELU], {RELU.name: made}, {})
    folder = root / "solutions"
    folder.mkdir()
    for i in range(solutions):
        body = BODIES[i % len(BODIES)]
        (folder / f"s{i:03}.py").write_text(SOLUTION.format(definition=RELU.name, body=body))


def judge(root: Path) -> None:
    given = [root / "dataset", "--solutions", root / "solutions", "-o", root / "judged", "--seconds", "0.02", "--trust"]
    command = [sys.executable, "-m", "kcap", "bench", *map(str, given)]
    done = subprocess.run([*command, "--device", "cpu"], check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, PARTIAL):
        sys.exit(done.returncode)


def left() -> tuple[int, int, int]:
    """Processes of this machine (the kernel's own, which have no command line, left out), and files in its temporary
    folder and shared memory."""
    processes = sum(bool(_command_line(name)) for name in os.listdir("/proc") if name.isdigit())
    return processes, len(os.listdir(tempfile.gettempdir())), len(os.listdir("/dev/shm"))


def _command_line(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def report(root: Path, seconds: float, before: tuple[int, int, int]) -> None:
    outcomes = list(outcomes_file.read_outcomes(root / "judged" / "outcomes.jsonl"))
    found = Counter(one.status for one in outcomes)
    judged = sum(found.values())
    names = ("processes", "temporary files", "shared memory")
    more = ", ".join(f"{name} {now - was:+d}" for name, now, was in zip(names, left(), before, strict=True))
    print(f"{judged} judged in {seconds:.1f} s, {seconds / judged:.3f} s each: {dict(found)}")
    for one in outcomes:
        if one.status != "PASSED":
            print(f"{one.solution} on {one.workload}: {one.status} ({one.reason})")
    print(f"left behind: {more}")


if __name__ == "__main__":
    main()

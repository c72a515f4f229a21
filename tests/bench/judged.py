"""A small dataset, Solutions of it that tell the fake judge what to say, and runs of `kcap bench` on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench_datasets import MASKED, SCALE, counted, workload

from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import ScalarInput
from kcap.schemas.results import outcome as outcomes_file
from kcap.schemas.results.outcome import Outcome

EPS = ScalarInput(value=0.5)
COUNTS = [counted(SCALE, "s1", 10, 0), counted(SCALE, "s2", 30, 1), counted(MASKED, "k1", 5, 2)]
WORKLOADS = {
    "scale": [workload(SCALE, "s1", eps=EPS), workload(SCALE, "s2", m=3, eps=EPS)],
    "masked": [workload(MASKED, "k1")],
}


def write_judged(root: Path, counts=COUNTS, workloads=WORKLOADS) -> Path:
    """`scale` on two Workloads, `masked` on one."""
    write_dataset(root, [SCALE, MASKED], workloads, {}, counts)
    return root


def write_solution(folder: Path, name: str, definition: str = "scale", author: str = "ann", **told: Any) -> Path:
    """A Solution in FlashInfer-Bench's form whose source is `told`, and a function for whoever looks for one."""
    source = "# " + json.dumps(told) + "\n"
    arguments = {"scale": "x, eps", "masked": "x, keep"}[definition]
    document = {
        "name": name,
        "definition": definition,
        "author": author,
        "spec": {
            "language": "python",
            "target_hardware": ["cpu"],
            "entry_point": "main.py::run",
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": f"{source}def run({arguments}):\n    return x\n"}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def outcomes_in(output: Path) -> list[Outcome]:
    return list(outcomes_file.read_outcomes(output / "outcomes.jsonl"))


def statuses(output: Path) -> dict[tuple[str, str], str]:
    return {(one.solution, one.workload): one.status for one in outcomes_in(output)}

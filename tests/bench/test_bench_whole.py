"""`kcap bench` with the judge itself: from files to Outcomes, with one Solution that harms, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from judged import outcomes_in, write_judged

pytestmark = pytest.mark.alone

RIGHT = "return x * eps"
WRONG = "return x * eps + 1"
FATAL = "import os\n    os._exit(0)"
LATE = "import os\n    os.kill(os.getppid(), 9)\n    return x * eps"


def write(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(f"# definition: scale\ndef run(x, eps):\n    {body}\n")


def test_right_is_right_wrong_is_wrong_and_harm_costs_its_own_result(kcap, tmp_path):
    write_judged(tmp_path / "dataset")
    for name, body in (("fatal", FATAL), ("late", LATE), ("right", RIGHT), ("wrong", WRONG)):
        write(tmp_path / "solutions", name, body)
    args = ("--solutions", tmp_path / "solutions", "-o", tmp_path / "out", "--trust", "--device", "cpu")
    before = mine()
    done = kcap("bench", tmp_path / "dataset", *args, "--seconds", 0.01, "--timeout", 10, "--workloads", 1)
    found = {one.solution: one for one in outcomes_in(tmp_path / "out")}
    assert done.code == 0, (done.err, {name: one.reason for name, one in found.items()})
    assert (found["right"].status, found["wrong"].status) == ("PASSED", "INCORRECT_NUMERICAL")
    assert found["fatal"].status == "RUNTIME_ERROR"
    assert found["late"].status != "NOT_JUDGED"
    assert found["right"].time is not None and found["right"].reference is not None
    assert mine() == before


def mine() -> set[str]:
    """Processes that this one started, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[stat.parent.name] = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    found, grown = set(), {str(os.getpid())}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found

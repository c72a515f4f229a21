"""When `scripts/gpu/judge.py` passes: what there was to judge has been judged."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcap.schemas.results.outcome import Clocked, Outcome

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    for name in ("judge", "counts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("judge")


def outcome(status: str = "PASSED", solution: str = "mean", workload: str = "one") -> Outcome:
    return Outcome(solution=solution, definition="mean", workload=workload, status=status)


MEAN = SimpleNamespace(name="mean", header={}, expect=set(), at_least_us=None)


def test_a_solution_that_is_asked_for_and_not_there_fails(judge: Any) -> None:
    (row,) = judge.missing(["mean", "nonesuch"], [MEAN])
    assert (row.what, row.passed) == ("nonesuch", False)


@pytest.mark.parametrize("chosen", [[], [MEAN]])
def test_a_catalogue_without_solutions_fails(chosen: list[Any], judge: Any) -> None:
    assert [row.passed for row in judge.missing([], chosen)] == ([] if chosen else [False])


def test_nothing_judged_is_no_pass(
    judge: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "bench", lambda *words, **more: pytest.fail("there is nothing to judge"))
    monkeypatch.setattr(sys, "argv", ["judge.py", "--only", "nonesuch", "-o", str(tmp_path / "judged.jsonl")])
    with pytest.raises(SystemExit) as ended:
        judge.main()
    assert ended.value.code == 1
    assert "BAD  judging: 0 of 1 as they must be" in capsys.readouterr().out


@pytest.mark.parametrize(("first", "last"), [("PASSED", "TIMEOUT"), ("TIMEOUT", "PASSED"), ("PASSED", "PASSED")])
def test_an_honest_solution_passes_on_all_of_its_workloads(first: str, last: str, judge: Any) -> None:
    row = judge.verdict(MEAN, True, [outcome(first), outcome(last)])
    assert row.passed is (first == last)


def test_a_solution_that_cannot_be_told_of_fails_and_the_next_is_judged(judge: Any) -> None:
    answers = iter([lambda: pytest.skip("it cannot be told here"), lambda: [outcome()]])
    one = SimpleNamespace(judge=lambda entry: next(answers)())
    try:
        rows = list(judge.catalogue(one, [MEAN, MEAN], True, time.monotonic() + 60, io.BytesIO()))
    except pytest.skip.Exception:
        pytest.fail("the table is lost")
    assert [row.passed for row in rows] == [False, True]


def test_what_kcap_says_nothing_of_fails(judge: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*words: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "times.jsonl").touch()
        found = outcome(solution="torch_linear", workload="gemm_n4096_k4096-16")
        (tmp_path / "out" / "outcomes.jsonl").write_bytes(found.line())
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(judge.subprocess, "run", run)
    rows = list(judge.sized(tmp_path, "cuda:0", 60.0, io.BytesIO()))
    assert [row.what for row in rows if row.passed] == ["torch_linear, gemm_n4096_k4096-16"]
    assert len(rows) == 2 * (2 * len(judge.ROWS) + 1)  # each with its reference's time


@pytest.mark.parametrize(
    ("judged", "replayed", "fine"),
    [([20.3], 20.0, True), ([20.5], 20.0, False), ([19.5], 20.0, False), ([8.0], 7.0, True), ([], 20.0, False)],
)
def test_long_kernels_take_as_long_by_both_clocks(judge: Any, judged: list[float], replayed: float, fine: bool) -> None:
    clocked = [Clocked(median_us=each, q1_us=each, q3_us=each) for each in judged]
    assert judge.agreement("gemm-16", clocked, replayed).passed is fine

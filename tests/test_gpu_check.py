"""What `scripts/gpu/check.py` makes of the scripts that it runs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
MODES = ("eager", "compiled", "piecewise", "full")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("check", "counts", "outputs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("check")


def line(mode: str, same: bool = True, control: bool = True, compiled: bool = True) -> str:
    said = f"{mode}: 768 tokens, recorded the same: {same} (control the same: {control}); "
    return f"{said}dynamo's counters the same: {compiled}; 48 steps recorded"


def passed(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, status: int = 0) -> bool:
    done = subprocess.CompletedProcess([], status, "\n".join(lines), "")
    monkeypatch.setattr(check, "run", lambda *words, **more: done)
    return all(row.passed for row in check.Parts(tmp_path, quick=True).outputs())


def test_outputs_pass_where_every_mode_is_the_same(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed(check, tmp_path, monkeypatch, *map(line, MODES))


def test_a_control_that_differs_does_not_fail_the_outputs(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passed(check, tmp_path, monkeypatch, line("eager", control=False), *map(line, MODES[1:]))


@pytest.mark.parametrize("what", ["same", "compiled"])
def test_a_difference_fails_the_outputs(what: str, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not passed(check, tmp_path, monkeypatch, *map(line, MODES[:3]), line("full", **{what: False}))


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("status", [0, 1])
def test_a_mode_that_is_missing_fails_the_outputs(
    status: int, count: int, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not passed(check, tmp_path, monkeypatch, *map(line, MODES[:count]), status=status)


def test_the_status_of_the_script_counts(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not passed(check, tmp_path, monkeypatch, *map(line, MODES), status=1)


def test_a_part_that_fails_costs_its_own_lines_alone(check: Any) -> None:
    def fails() -> list[Any]:
        raise IndexError("nothing printed")

    (row,) = check.tried("counts", fails, float("inf"))
    assert (row.what, row.found, row.passed) == ("counts", "IndexError: nothing printed", False)
    (row,) = check.tried("counts", fails, 0.0)
    assert "not tried" in row.found


def test_a_command_that_takes_too_long_is_told(check: Any) -> None:
    script = "import time; print('so far', flush=True); time.sleep(60)"
    done = check.run(sys.executable, "-c", script, timeout=3)
    assert (done.returncode, done.stdout) == (124, "so far\n")

"""What `scripts/gpu/check.py` makes of the scripts that it runs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.recording.recording import Metadata, write_recording

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


FINE = "ok   honest add: PASSED (1.0 s)\n"
SLOW = "throughput loss, llama, eager, batch 16: median 0.4%, from 0.1% to 0.9%; A/A median 0.2%, at most 0.3%\n"


def says(check: Any, monkeypatch: pytest.MonkeyPatch, text: str, status: int) -> None:
    monkeypatch.setattr(check, "run", lambda *words, **more: subprocess.CompletedProcess([], status, text, ""))


@pytest.mark.parametrize("status", [1, 124, -9])
def test_a_script_that_ends_before_its_table_fails(
    status: int, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(check, monkeypatch, FINE, status)
    fine, ended = check.Parts(tmp_path, quick=True).judging()
    assert fine.passed and (ended.found, ended.passed) == (f"status {status}", False)


def test_a_script_that_said_what_fails_needs_no_status(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(check, monkeypatch, f"{FINE}BAD  judging: 0 of 1\n", 1)
    assert [row.passed for row in check.Parts(tmp_path, quick=True).judging()] == [True, False]


@pytest.mark.parametrize(("said", "status", "holds"), [(SLOW, 0, True), (SLOW, 1, False), ("", 0, False)])
def test_the_cost_counts_only_where_its_script_ended_well(
    said: str, status: int, holds: bool, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(check, monkeypatch, said, status)
    assert all(row.passed for row in check.Parts(tmp_path, quick=True).overhead()) is holds


@pytest.mark.parametrize(
    ("last", "passed"), [("12 passed, 3 skipped in 4.10s", True), ("15 skipped in 0.51s", False), ("", False)]
)
def test_tests_that_were_all_skipped_have_not_passed(
    last: str, passed: bool, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(check, monkeypatch, last, 0)
    (row,) = check.Parts(tmp_path, quick=True).tests()
    assert row.passed is passed


def test_a_recording_of_another_depth_is_neither_replayed_nor_exported(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(check, "run", lambda *words, **more: ran.append(words))
    write_recording(tmp_path / "llama.kcap", Metadata(layers_recorded=4), [])
    parts = check.Parts(tmp_path, quick=False)
    for (row, *more), found in ((parts.replay(), "4, to be 32"), (parts.datasets()[1:], "4, to be 32")):
        assert (row.what, row.found, row.passed, more) == ("llama: layers", found, False, [])
    assert not ran


def test_a_recording_that_is_missing_fails_the_datasets(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(check, monkeypatch, "ok   llama: references on the GPU: 9 agrees\n", 0)
    write_recording(tmp_path / "llama.kcap", Metadata(layers_recorded=4), [])
    assert [(row.what, row.passed) for row in check.Parts(tmp_path, quick=True).datasets()] == [
        ("llama-eager: layers", False),
        ("llama: references on the GPU", True),
    ]

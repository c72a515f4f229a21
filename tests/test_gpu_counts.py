"""What `scripts/gpu/counts.py` and `verified_exports.py` make of a Recording in which nothing was compared."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kcap
from kcap.schemas.recording.recording import Call, Count, Launch, Metadata, Program, Step, write_recording
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"
KERNEL = Call(
    id=0,
    operator="triton::norm.0a1b2c3d",
    launch=Launch(function="norm", grid=[1, 1, 1]),
    counts=[Count(phase="decode", count=2)],
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("counts", "verified_exports", "sglang_counts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two decode steps, none of them profiled."""
    steps = [Step(index=index, phase="decode", tokens=1, program=0) for index in range(2)]
    programs = [Program(id=0, calls=[0], counts=[Count(phase="decode", count=2)])]
    write_recording(tmp_path / "llama.kcap", Metadata(layers_recorded=4), [KERNEL], programs, steps)
    return tmp_path / "llama.kcap"


def profiled(path: Path, *names: str, program: int | None = 0) -> None:
    kernels = [KernelTime(name=name, us=1.0, call=0) for name in names]
    coverage.write(path / coverage.FILE, [StepCoverage(index=0, phase="decode", program=program, kernels=kernels)])


@pytest.mark.parametrize(("names", "holds"), [(("norm",), True), (("norm", "norm"), False), ((), False)])
def test_a_kernel_runs_as_often_as_the_profiler_saw_it(
    names: tuple[str, ...], holds: bool, path: Path, scripts: Any
) -> None:
    profiled(path, *names)
    counts = scripts("counts")
    assert all(row.passed for row in counts.check_launches(counts.Counts(path))) is holds


def test_without_a_profiled_step_the_kernels_have_not_been_compared(path: Path, scripts: Any) -> None:
    counts = scripts("counts")
    for write in (lambda: None, lambda: profiled(path, "norm", program=None)):
        write()
        (row,) = counts.check_launches(counts.Counts(path))
        assert not row.passed and "--check-coverage" in row.found


@pytest.mark.parametrize("script", ["counts", "sglang_counts"])
def test_a_recording_without_coverage_does_not_pass(script: str, path: Path, scripts: Any) -> None:
    rows = scripts(script).check(path, 4)
    assert {row.what for row in rows if not row.passed} >= {
        "kernels of own source that the profiler counts otherwise",
        "GPU time of recorded calls",
    }


def test_the_depth_is_that_of_the_recording(path: Path, scripts: Any) -> None:
    counts = scripts("counts")
    assert [counts.check_depth(path, layers).passed for layers in (4, 32)] == [True, False]
    assert "recording.json" in counts.check_depth(path.parent / "none.kcap", 4).found


@pytest.mark.parametrize(
    ("statuses", "passed"),
    [(["agrees", "skipped"], True), (["agrees", "differs"], False), (["skipped"], False), ([], False)],
)
def test_references_that_nobody_ran_do_not_agree(
    statuses: list[str], passed: bool, tmp_path: Path, scripts: Any
) -> None:
    lines = [json.dumps({"status": status, "definition": "mm", "operator": "aten::mm"}) for status in statuses]
    (tmp_path / "checks.jsonl").write_text("\n".join(lines))
    assert scripts("verified_exports").checked(tmp_path).passed is passed


def test_without_gpu_time_no_share_of_it_is_in_families(path: Path, scripts: Any) -> None:
    row = scripts("verified_exports").family_time(kcap.load(path))
    assert not row.passed and "--check-coverage" in row.found

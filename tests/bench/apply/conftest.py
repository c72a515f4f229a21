"""A Recording whose one kernel can be replaced, and windows of processes in which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from applied_plans import plan_of, python_solution

import kcap as package
from kcap.bench.apply import process
from kcap.bench.apply.process import PlanWindow, session_options
from kcap.capture.session import Session
from kcap.schemas.derive.derive import derive
from kcap.schemas.recording.recording import Recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of a ReLU of a matrix of 4 rows and 8 columns."""
    output = tmp_path_factory.mktemp("recorded") / "out.kcap"
    with torch.no_grad(), package.record(output):
        torch.relu(torch.randn(4, 8))
    return package.load(output)


@pytest.fixture
def started(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., PlanWindow]]:
    """A window whose plan replaces ReLU; `checks`: of it by itself, which in a graph cannot be."""
    windows: list[PlanWindow] = []

    def start(source: str, checks: int = 0) -> PlanWindow:
        monkeypatch.setattr(process, "CHECKS", checks)
        plan = plan_of(recording, python_solution(derive(recording).kernels[0].definition.name, source))
        session = Session(str(tmp_path / "shards"), window="manual", **session_options([plan], tmp_path, compared=1))
        Path(session.directory).mkdir()
        windows.append(PlanWindow(session))
        windows[0].loaded(rank=0)
        return windows[0]

    yield start
    for window in windows:
        for seam in window._seams:
            seam.uninstall()

"""When `scripts/gpu/overhead.py`, `overhead_by_step.py` and `replays.py` have compared nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"


@pytest.mark.parametrize(
    ("on", "off", "holds"), [(64, 0, True), (65, 0, True), (63, 0, False), (0, 0, False), (64, 1, False)]
)
def test_runs_with_recording_record_and_those_without_do_not(
    on: float, off: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    overhead = importlib.import_module("overhead")
    whole = {"tokens": 64.0, "steps on": 64.0, "steps off": 0.0}
    assert overhead.held([whole, whole | {"steps on": on, "steps off": off}]) is holds


@pytest.mark.parametrize("asked", ["0", "30", "199"])
def test_too_few_replays_show_no_growth(asked: str) -> None:
    command = [sys.executable, str(SCRIPTS / "replays.py"), "--replays", asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parents[1], env=None)
    assert done.returncode == 2 and f"--replays {asked}: fewer than 200" in done.stderr

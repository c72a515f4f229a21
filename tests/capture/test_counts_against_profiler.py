"""kcap's counts against an independent counter's, torch's profiler: on any program, each operator ran as often."""

from __future__ import annotations

import importlib
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from composed_programs import Program, programs, run
from hypothesis import HealthCheck, given, settings
from torch.profiler import record_function

import kcap

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def counter() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("count_operators")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs())
def test_any_program_is_counted_as_the_profiler_counts_it(
    program: Program, counter: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{uuid.uuid4()}.kcap"
    with counter.profiler() as profiler:
        with record_function(counter.START):
            pass
        with kcap.record(path):
            run(program)
    assert counter.compare(counter.count_recording(kcap.load(path)), counter.count_events(profiler)) == []


def test_a_recorded_program_is_counted_as_the_profiler_counts_it() -> None:
    """Threads call modules while the window opens; then every kind of block runs, inside steps and outside."""
    words = [sys.executable, SCRIPTS / "count_operators.py", Path(__file__).with_name("composed_programs.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[:-1]) == (0, []), done.stderr
    assert "0 differ; kcap record: 0" in done.stdout

"""Recordings written by hand, and a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from handmade import Values

from kcap.replay.jobs import REPLAY_WORKER
from kcap.schemas.recording.recording import Call, Metadata, Program, Sample, Step, write_recording
from kcap.system.worker_process import Worker

Write = Callable[..., Path]


@pytest.fixture
def values() -> Values:
    return Values()


@pytest.fixture
def recorded(tmp_path: Path, values: Values) -> Write:
    """Writes a Recording of these Calls, Samples, Programs and Steps and gives its path."""

    def write(
        calls: Iterable[Call],
        samples: Iterable[Sample] = (),
        programs: Iterable[Program] = (),
        steps: Iterable[Step] = (),
    ) -> Path:
        path = tmp_path / "rec.kcap"
        write_recording(path, Metadata(), calls, programs, steps, samples, values.files)
        return path

    return write


@pytest.fixture(scope="module")
def worker() -> Iterable[Worker]:
    """A worker on the CPU without a Recording. It outlives any Call, so a module's tests share it."""
    session = {"device": "cpu", "home": "cpu", "root": None, "operators": [], "threads": 1}
    with Worker(session, REPLAY_WORKER) as started:
        yield started

"""The replays that a fidelity asks a worker for, on a CPU: only the durations of GPU kernels are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from handmade import call, tensor
from profiled import kernel, step

from kcap.errors import CallError
from kcap.replay.fidelity import replaying
from kcap.replay.fidelity.compare import ReplayedCall
from kcap.replay.fidelity.engine import KindSteps, profiled_kinds
from kcap.replay.fidelity.replaying import (
    ON_HOST,
    GpuReplayer,
    NearestSample,
    of_other_ranks,
    open_replayer,
    replay_kinds,
)
from kcap.replay.jobs import REPLAY_WORKER, ReplaySession
from kcap.replay.program.run import MIN_TIMEOUT_S
from kcap.schemas.recording.recording import Metadata, Program, Recording, Sample, load, write_recording
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import Drift, Group, TensorSpec
from kcap.schemas.results import coverage
from kcap.system.worker_process import Worker

MM = call("aten::mm", tensor(8, 8), tensor(8, 8, storage=1))
FILL = call("aten::fill_.Scalar", tensor(8), Drift("int"), id=1)
UNKNOWN = call("nobody::kernel", tensor(2), id=2)
SAMPLES = [Sample(call=1, phase="decode", scalars={"1": value}) for value in (3, 4)]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    path = tmp_path / "rec.kcap"
    write_recording(path, Metadata(), [MM, FILL, UNKNOWN], [Program(id=0, calls=[0, 1, 0, 2])], samples=SAMPLES)
    coverage.write(path / coverage.FILE, [step(kernel(0, 9), kernel(1, 1))] * 2)
    return load(path)


@pytest.fixture
def kind(recording: Recording) -> KindSteps:
    (found,) = profiled_kinds(recording)
    return found


@pytest.fixture
def worker(recording: Recording) -> Iterator[Worker]:
    session = {"device": "cpu", "home": "cpu", "root": str(recording.path), "operators": [], "threads": 1}
    with Worker({**session, "cache": "serving", "kernels": True}, REPLAY_WORKER) as started:
        yield started


def test_calls_and_their_program_are_replayed(recording: Recording, kind: KindSteps, worker: Worker) -> None:
    found = replay_kinds(recording, [kind, kind], GpuReplayer(recording, worker, 0.001, 60))
    statuses = [(one.call, one.status, one.sample, one.count) for one in found.measurements]
    assert statuses == [(0, "ok", None, 4), (1, "ok", 0, 2), (2, "skipped", None, 2)] * 2
    assert found.measurements[:3] == found.measurements[3:]  # replayed once
    first = found.programs[0]
    assert (first.program, first.phase, first.count, first.invocations) == (0, "decode", 2, 4)
    assert [(one.call, one.status, one.sample) for one in first.calls] == [
        (0, "ok", None),
        (1, "ok", 0),
        (2, "skipped", None),
    ]
    assert first.median_us and first.left_out == 1
    serving = found.fidelity.kinds[0].serving
    assert [(one.name, one.reason) for one in serving.missing][:1] == [("aten::mm", ON_HOST)]


def test_the_chosen_sample_reaches_the_worker(recording: Recording, kind: KindSteps, worker: Worker) -> None:
    replays = GpuReplayer(recording, worker, 0.001, 60)
    found = [replays.call(FILL, NearestSample(SAMPLES[index], index), kind) for index in (1, 0, 1)]
    assert [one.sample for one in found] == [1, 0, 1]
    assert found[0].samples_us == found[2].samples_us != found[1].samples_us


class Patient:
    """A worker that keeps how long it was given."""

    environment = {"device": "cpu"}

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.bodies: list[dict[str, Any]] = []

    def run(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.timeouts.append(timeout)
        self.bodies.append(body)
        return {"status": "skipped", "reason": "none"}


@pytest.mark.parametrize(("timeout", "given"), [(1.0, MIN_TIMEOUT_S), (7000.0, 7000.0)])
def test_a_program_has_as_long_as_replay_by_itself_gives_it(
    timeout: float, given: float, recording: Recording, kind: KindSteps
) -> None:
    worker = Patient()
    replay_kinds(recording, [kind], GpuReplayer(recording, cast(Worker, worker), 0.001, timeout))
    assert worker.timeouts == [timeout] * 3 + [given]


def test_a_call_without_a_sample_runs_on_the_sequences_of_each_kind(tmp_path: Path) -> None:
    attention = call("lib::attention", tensor(4, 8), TensorSpec((4,), "int32", storage=1))
    path = tmp_path / "rec.kcap"
    write_recording(path, Metadata(), [attention, MM.model_copy(update={"id": 1})], [Program(id=0, calls=[0, 1])])
    batches = [{"lengths": lengths, "queries": [1] * len(lengths)} for lengths in ([9, 8], [5])]
    kinds = [step(kernel(0, 9), kernel(1, 9), sequences=len(batch["lengths"]), **batch) for batch in batches]
    coverage.write(path / coverage.FILE, kinds)
    worker, recording = Patient(), load(path)
    replay_kinds(recording, profiled_kinds(recording), GpuReplayer(recording, cast(Worker, worker), 0.001, 60))
    told = [(body.get("call", {}).get("operator"), body["batch"]["lengths"]) for body in worker.bodies]
    assert told == [
        ("lib::attention", [9, 8]),
        ("aten::mm", [9, 8]),
        (None, [9, 8]),
        ("lib::attention", [5]),
        (None, [5]),
    ]


def test_a_collective_of_another_rank_is_replayed_in_the_program_of_one() -> None:
    groups = [Argument(name="group", value=Group(2, rank, "tp")) for rank in (0, 1)]
    first, second, other = (
        MM.model_copy(update={"id": number, "operator": operator, "args": [*MM.args, group]})
        for number, (operator, group) in enumerate(
            [("vllm::all_reduce", groups[0]), ("vllm::all_reduce", groups[1]), ("vllm::all_gather", groups[1])]
        )
    )
    own = MM.model_copy(update={"id": 3})
    inside = {0: ReplayedCall(4.0), 4: ReplayedCall(9.0)}
    assert of_other_ranks(inside, [first, second, other, own]) == {1: inside[0]}


def test_a_recording_of_a_cpu_is_refused(recording: Recording) -> None:
    with pytest.raises(CallError, match="of a CPU"), open_replayer(recording, None, 0.001, 60, trust=False):
        pass


@pytest.mark.parametrize(
    ("arguments", "dummy"),
    [
        ({"load_format": "dummy"}, True),
        ({"load_format": "DUMMY"}, True),
        ({"load_format": "auto"}, False),
        ({"load_format": "dummy", "quantization": "fp8"}, False),
        ({}, False),
    ],
)
def test_the_worker_is_told_of_dummy_weights(
    arguments: dict[str, str], dummy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of those that the engine itself quantizes: they are drawn in wider floats."""
    sessions: list[ReplaySession] = []

    @contextmanager
    def worker(session: ReplaySession, module: str) -> Iterator[SimpleNamespace]:
        sessions.append(session)
        yield SimpleNamespace(environment={"device": "cuda:0"})

    monkeypatch.setattr(replaying, "GroupedWorker", worker)
    write_recording(tmp_path / "rec.kcap", Metadata(engine_arguments=arguments), [MM], [Program(id=0, calls=[0])])
    with open_replayer(load(tmp_path / "rec.kcap"), None, 0.001, 60, trust=False):
        assert [session["dummy_weights"] for session in sessions] == [dummy]

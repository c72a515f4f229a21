"""Steps that run under the profiler before the counted ones: they explain GPU time, and change no count."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import captured

import kcap as kcap_package
from kcap.capture.fold.coverage import coverage_lines
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.window import profiled
from kcap.capture.window.profiled import MOST_OFFLINE, MOST_STEPS
from kcap.capture.window.step import MAX_STEP_LINES
from kcap.capture.window.window import StepShape, Window
from kcap.replay.fidelity.engine import StepKind
from kcap.replay.fidelity.replaying import nearest_sample, steps_by_rank
from kcap.replay.source import samples_by_call
from kcap.schemas.recording.recording import Recording, Sample
from kcap.schemas.results import coverage as coverage_format
from kcap.schemas.results.coverage import CoverageSummary, StepCoverage
from kcap.system import machine, nvml

A, REPEATS = torch.eye(4), torch.arange(4) % 2
OFFLINE = {"check_coverage": True}
COMMAND = {"check_coverage": True, "command": ["an", "engine"]}


def started(directory: Path, **options: Any) -> Window:
    session = Session(str(directory / "shards"), **options)
    session.write()
    window = Window(session)
    window.register()
    window.start()
    return window


def run(window: Window, steps: int) -> None:
    """As many decode steps: a forward of two calls, and after a pause a call that is sampled."""
    with torch.no_grad():
        for step in range(steps):
            window.begin(StepShape("decode", [1], [step]))
            torch.mm(A, A) + 1
            window.pause()
            torch.exp(A)  # the engine's own work between the forward and the sampling
            window.resume()
            torch.repeat_interleave(A, REPEATS, dim=0)
            window.end()


def finished(window: Window, directory: Path) -> Recording:
    window.close()
    return fold_session(window.session, directory / "out")


def profiled_steps(recording: Recording) -> list[StepCoverage]:
    return list(coverage_format.read(recording.path / coverage_format.FILE))


def counted(recording: Recording) -> dict[str, int]:
    return {call.operator: call.total for call in recording.kernels()}


def checked(directory: Path, before: int, steps: int) -> Recording:
    """Recorded offline: steps under the profiler while the session's file is there, then those that count."""
    window = started(directory, **OFFLINE)
    run(window, before)
    window.session.profile_file.unlink()
    run(window, steps)
    return finished(window, directory)


def test_profiled_steps_change_no_count_and_no_sample_drawn(tmp_path: Path) -> None:
    window = started(tmp_path / "without")
    run(window, 5)
    without, with_coverage = finished(window, tmp_path / "without"), checked(tmp_path / "with", 3, 5)
    for table in ("calls", "programs", "steps", "samples"):
        assert getattr(with_coverage, table) == getattr(without, table), table
    assert without.samples
    assert with_coverage.metadata.steps == without.metadata.steps == {"decode": 5}
    assert with_coverage.metadata.batches == without.metadata.batches
    assert with_coverage.metadata.complete


@pytest.fixture
def paged() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kcp", "DEF") as library:
        library.define("attend(Tensor q, Tensor seq_lens) -> Tensor")
        library.impl("attend", lambda q, lengths: q + 1, "CPU")
        yield library


def lengths_of(recording: Recording, samples: list[Sample]) -> list[list[int]]:
    return [recording.array(tensor).tolist() for sample in samples for tensor in sample.tensors.values()]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.usefixtures("no_gradients", "paged")
def test_a_profiled_batch_has_a_sample_however_rare_it_is(graphs: bool, kind: Any, tmp_path: Path) -> None:
    """Batches of 6 and of 12 run padded to 16, the former in one profiled step and in one of many that count, of which
    not each is listed."""
    window = started(tmp_path, **OFFLINE)
    lengths = torch.zeros(16, dtype=torch.int32)

    def attend() -> None:
        for _ in range(3):  # layers
            torch.ops.kcp.attend(A, lengths)

    run_forward = captured(kind, attend).replay if graphs else attend
    rare = MAX_STEP_LINES + 501
    counted = [12] * rare + [6] + [12] * 99

    def step(number: int, sequences: int) -> None:
        lengths.copy_(torch.tensor([number] * sequences + [0] * (16 - sequences)))
        window.begin(StepShape("decode", [1] * sequences, [number] * sequences))
        run_forward()
        window.end()

    for number, sequences in enumerate([12, 6, 12]):
        step(1000 + number, sequences)
    window.session.profile_file.unlink()
    for number, sequences in enumerate(counted):
        step(number, sequences)
    recording = finished(window, tmp_path)
    drawn = [sample.step for sample in recording.samples if not sample.compared]
    compared = [sample for sample in recording.samples if sample.compared]
    assert len(drawn) == 4 and rare not in drawn
    assert [sample.step for sample in compared] == sorted({0, rare} - {*drawn})
    assert lengths_of(recording, compared)[-1] == [rare] * 6 + [0] * 10
    assert {step.index for step in recording.steps} >= {0, rare}
    (call,) = (call for call in recording.kernels() if call.operator == "kcp::attend")
    samples = samples_by_call(recording.samples, compared=True)[call.id]
    for sequences in (6, 12):
        wanted = StepKind("decode", sequences, sequences, "eager")
        assert nearest_sample(samples, wanted, [], steps_by_rank(recording.steps)).sequences == sequences
    assert recording.drawn_samples == [sample for sample in recording.samples if not sample.compared]


@pytest.mark.usefixtures("no_gradients", "paged")
def test_profiled_batches_have_samples_where_each_step_has_a_thread_of_its_own(tmp_path: Path) -> None:
    window = started(tmp_path, **OFFLINE)

    def step(number: int, sequences: int = 1) -> None:
        lengths = torch.full((16,), number, dtype=torch.int32)
        with torch.no_grad():
            window.begin(StepShape("decode", [1] * sequences, [1] * sequences))
            torch.ops.kcp.attend(A, lengths)
            window.end()

    for sequences in (2, 3):
        step(1000, sequences)
    window.session.profile_file.unlink()
    step(0)  # the profiler ends on its own thread
    for number in range(1, 100):
        threaded = threading.Thread(target=step, args=(number, {30: 2, 60: 3}.get(number, 1)))
        threaded.start()
        threaded.join()
    recording = finished(window, tmp_path)
    compared = [sample for sample in recording.samples if sample.compared]
    assert lengths_of(recording, compared) == [[30] * 16, [60] * 16]
    assert len(recording.drawn_samples) == 4


@pytest.mark.usefixtures("no_gradients", "paged")
def test_a_step_that_does_not_count_leaves_its_kind_to_the_next(tmp_path: Path) -> None:
    window = started(tmp_path, **OFFLINE)
    lengths = torch.zeros(16, dtype=torch.int32)

    def step(number: int, sequences: int = 1, fails: bool = False) -> None:
        lengths.fill_(number)
        window.begin(StepShape("decode", [1] * sequences, [1] * sequences))
        torch.ops.kcp.attend(A, lengths)
        window.discard() if fails else window.end()

    step(1000, 2)
    window.session.profile_file.unlink()
    for number in range(50):
        step(number)
    step(50, 2, fails=True)
    step(51, 2)
    step(52, 2)
    for number in range(53, 100):
        step(number)
    recording = finished(window, tmp_path)
    compared = [sample for sample in recording.samples if sample.compared]
    assert lengths_of(recording, compared) == [[51] * 16]


def test_profiled_steps_without_a_gpu_say_so_and_still_hold_profiler_against_recorder(tmp_path: Path) -> None:
    recording = checked(tmp_path, 3, 5)
    found = profiled_steps(recording)
    assert [(step.index, step.phase, step.tokens, step.sequences) for step in found] == [
        (index, "decode", 1, 1) for index in range(3)
    ]
    assert [(step.lengths, step.queries) for step in found] == [([index], [1]) for index in range(3)]
    assert {step.program for step in found} <= {program.id for program in recording.programs}
    assert not any(step.disagreements for step in found)
    summary = CoverageSummary.model_validate(recording.metadata.coverage)
    assert (summary.steps, summary.kernels, summary.share) == (3, 0, None)
    assert coverage_lines(summary) == ["coverage: the profiler saw no GPU time in 3 steps"]
    assert not list(recording.path.rglob("*trace.json"))


class Gpu:
    """Stands in for a GPU: what was asked of it, in order, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.clock: tuple[int, int] | None = (1740, 1980)
        self.broken = False
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "synchronize", self._finish)
        monkeypatch.setattr(profiled, "time", SimpleNamespace(sleep=lambda seconds: self.asked.append("rest")))
        monkeypatch.setattr(nvml, "sm_clock", self._sm_clock)

    def _finish(self) -> None:
        self.asked.append("finish")
        if self.broken:
            raise RuntimeError("an illegal memory access")

    def _sm_clock(self, device: str) -> tuple[int, int] | None:
        self.asked.append(device)
        return self.clock


def test_the_gpu_rests_before_each_profiled_step_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = started(tmp_path, **OFFLINE)
    gpu = Gpu(monkeypatch)
    run(window, 2)
    opened, asked = gpu.asked[:2], gpu.asked[2:]
    assert opened == ["finish", "cuda:3"]
    assert asked == 2 * ["finish", "rest", "finish", "cuda:3"]
    gpu.clock = None
    run(window, 1)
    window.session.profile_file.unlink()
    run(window, 1)  # the profile ends, and waits for the GPU once
    assert gpu.asked[10:] == ["finish", "rest", "finish", "cuda:3", "finish"]
    monkeypatch.undo()
    assert [step.sm_mhz for step in profiled_steps(finished(window, tmp_path))] == [1740, 1740, None]


@pytest.mark.parametrize("by_this_thread", [True, False])
def test_while_a_graph_is_captured_the_gpu_is_left_alone(by_this_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: by_this_thread)
    of = profiled.CoolDown(lambda: not by_this_thread)
    of.rest()
    assert (of.sm_mhz(), gpu.asked) == (None, [])


def test_a_capture_that_kcap_sees_on_another_thread_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = started(tmp_path, **OFFLINE)
    gpu = Gpu(monkeypatch)
    window.capturing = 1
    run(window, 1)
    assert gpu.asked == []
    monkeypatch.undo()
    finished(window, tmp_path)


def test_a_gpu_that_has_failed_costs_the_rests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = started(tmp_path, **OFFLINE)
    gpu = Gpu(monkeypatch)
    gpu.broken = True
    run(window, 2)
    monkeypatch.undo()
    window.session.profile_file.unlink()
    run(window, 3)
    recording = finished(window, tmp_path)
    assert gpu.asked == 5 * ["finish"]
    assert (recording.metadata.steps, recording.metadata.complete) == ({"decode": 3}, True)
    assert [step.sm_mhz for step in profiled_steps(recording)] == [None, None]


def test_calls_that_the_recorder_misses_in_a_profiled_step_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = started(tmp_path, **OFFLINE)
    recorder = window.recorder
    assert recorder is not None
    monkeypatch.setattr(recorder, "step_resume", lambda: None)  # misses what follows a pause
    run(window, 2)
    (found,) = CoverageSummary.model_validate(finished(window, tmp_path).metadata.coverage).disagreements
    assert (found.operator, found.profiled, found.recorded) == ("aten::repeat_interleave", 2, 0)


def test_steps_past_the_most_that_are_profiled_wait_for_the_file_to_go(tmp_path: Path) -> None:
    recording = checked(tmp_path, MOST_OFFLINE + 4, 2)
    assert len(profiled_steps(recording)) == MOST_OFFLINE
    assert recording.metadata.steps == {"decode": 2}
    assert counted(recording) == {"aten::mm": 2, "aten::add.Tensor": 2, "aten::repeat_interleave.self_Tensor": 2}


def test_the_first_steps_of_a_command_are_profiled_and_the_others_count(tmp_path: Path) -> None:
    window = started(tmp_path, **COMMAND)
    run(window, MOST_STEPS + 4)
    recording = finished(window, tmp_path)
    assert len(profiled_steps(recording)) == MOST_STEPS
    assert recording.metadata.steps == {"decode": 4}
    assert [step.lengths for step in recording.steps] == [[MOST_STEPS + number] for number in range(4)]


def test_the_steps_of_another_thread_count_and_what_was_profiled_is_kept(tmp_path: Path) -> None:
    """A program that warms up on its main thread, and serves on another."""
    window = started(tmp_path, **COMMAND)
    run(window, 1)
    with ThreadPoolExecutor(1) as serving:
        serving.submit(run, window, MOST_STEPS + 4).result()
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": MOST_STEPS + 4}
    assert counted(recording)["aten::mm"] == MOST_STEPS + 4
    assert [step.disagreements for step in profiled_steps(recording)] == [[]]
    assert recording.metadata.complete and not recording.metadata.notes


def test_a_profile_of_another_thread_is_written_at_that_thread_s_next_step(tmp_path: Path) -> None:
    window = started(tmp_path, **COMMAND)
    with ThreadPoolExecutor(1) as serving:
        for _ in range(2):
            serving.submit(run, window, 3).result()
            run(window, 2)
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": 2 + 3 + 2}
    assert [step.index for step in profiled_steps(recording)] == [0, 1, 2]


def test_while_an_engine_is_profiled_steps_of_another_thread_are_neither_profiled_nor_counted(tmp_path: Path) -> None:
    window = started(tmp_path, **OFFLINE)
    run(window, 2)
    with ThreadPoolExecutor(1) as other:
        other.submit(run, window, 5).result()
        run(window, 1)
        window.session.profile_file.unlink()
        other.submit(run, window, 5).result()
    recording = finished(window, tmp_path)
    assert recording.metadata.steps == {"decode": 5}
    assert [step.index for step in profiled_steps(recording)] == [0, 1, 2]


def test_a_limit_of_steps_is_of_counted_ones(tmp_path: Path) -> None:
    window = started(tmp_path, steps=3, **COMMAND)
    run(window, MOST_STEPS + 9)
    assert finished(window, tmp_path).metadata.steps == {"decode": 3}


def test_a_step_that_raises_under_the_profiler_is_left_out_of_the_coverage(tmp_path: Path) -> None:
    window = started(tmp_path, **OFFLINE)
    run(window, 1)
    window.begin(StepShape("decode", [1], [1]))
    torch.mul(A, A)
    window.discard()
    run(window, 1)
    found = profiled_steps(finished(window, tmp_path))
    assert [step.index for step in found] == [0, 2]
    assert not any(step.disagreements for step in found)


def test_a_profiler_that_does_not_start_costs_the_coverage_and_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("of the profiler")

    monkeypatch.setattr(profiled, "_start", broken)
    recording = checked(tmp_path, 3, 5)
    assert recording.metadata.steps == {"decode": 5}
    assert counted(recording)["aten::mm"] == 5
    assert [(tap.name, tap.detail) for tap in recording.metadata.taps if tap.status == "failed"] == [
        ("coverage", "RuntimeError: of the profiler")
    ]
    assert not recording.metadata.complete


def test_a_window_that_closes_while_it_profiles_keeps_what_was_profiled(tmp_path: Path) -> None:
    window = started(tmp_path, **COMMAND)
    run(window, 3)
    window.session.stop_file.touch()  # seen by a thread of kcap's own
    deadline = time.monotonic() + 10
    while window.following and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not window.following
    recording = finished(window, tmp_path)
    assert len(profiled_steps(recording)) == 3
    assert recording.metadata.complete
    assert not any(call.total for call in recording.calls)


STANDS_FOR_AN_ENGINE = """
import os, sys
from kcap.capture.session import SESSION_VARIABLE, read_session
from kcap.capture.window.window import StepShape, Window
import torch
window = Window(read_session(os.environ[SESSION_VARIABLE]))
window.register()
window.start()
a = torch.eye(4)
for step in range(int(sys.argv[1])):
    window.begin(StepShape("decode", [1], [step]))
    torch.mm(a, a)
    window.end()
"""


@pytest.mark.parametrize(("steps", "code"), [(MOST_STEPS + 4, 0), (MOST_STEPS, 1)])
def test_a_command_with_no_step_after_the_profiled_ones_recorded_nothing(
    steps: int, code: int, kcap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)  # the profiler works without one
    script = tmp_path / "engine.py"
    script.write_text(STANDS_FOR_AN_ENGINE)
    ran = kcap("record", "--check-coverage", "-o", tmp_path / "out", "--", sys.executable, script, steps)
    assert ran.code == code, ran.err
    assert f"coverage: the profiler saw no GPU time in {MOST_STEPS} steps" in ran.err
    assert (f"the first {MOST_STEPS} steps ran under the profiler" in ran.err) == bool(code)
    assert kcap_package.load(tmp_path / "out").metadata.steps == ({"decode": 4} if code == 0 else {})

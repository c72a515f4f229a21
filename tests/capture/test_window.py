"""The recording window of a process: `kcap.record()`, steps, and failures that stay kcap's own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kcap
from kcap.capture.fold.recording import fold_session
from kcap.capture.recorder.native_recorder import NativeRecorder
from kcap.capture.session import Session
from kcap.capture.shards.counts import all_closed
from kcap.capture.shards.reader import read_shard, stems
from kcap.capture.window.window import WATCH_POLL, StepShape, Window
from kcap.errors import CallError
from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
Counted = Callable[[Recording], dict[str, int]]
Python = Callable[..., "subprocess.CompletedProcess[str]"]
both = pytest.mark.parametrize("recorder", ["native", "python"])
A = torch.eye(4)


def recorded(tmp_path: Path, recorder: str, **options: Any) -> tuple[list[float], Recording]:
    """The outputs of 40 decode steps of 30 calls each in a window of its own, and its Recording."""
    session = Session(str(tmp_path / "shards"), recorder=recorder, **options)
    session.write()
    window = Window(session)
    window.register()
    window.start()
    outputs = []
    with torch.no_grad():
        for step in range(40):
            window.begin(StepShape("decode", [1], [step]))
            outputs.append(sum((torch.mm(A, A) + step).sum().item() for _ in range(10)))
            window.end()
    window.close()
    return outputs, fold_session(session, tmp_path / "out")


EXPECTED = [10 * (4.0 + 16 * step) for step in range(40)]


@both
def test_steps_count_by_phase_and_batch(recorder: str, tmp_path: Path) -> None:
    outputs, recording = recorded(tmp_path, recorder)
    assert outputs == EXPECTED
    assert recording.metadata.steps == {"decode": 40}
    eager = {"mode": "eager", "padded": 0}
    assert recording.metadata.batches == [{"phase": "decode", "tokens": 1, "sequences": 1, **eager, "steps": 40}]
    assert {call.operator: call.total for call in recording.calls if call.operator == "aten::mm"} == {"aten::mm": 400}
    assert [step.lengths for step in recording.steps] == [[step] for step in range(40)]
    assert sum(count.count for program in recording.programs for count in program.counts) == 40


@both
def test_every_call_is_in_the_programs_as_often_as_it_counts(recorder: str, tmp_path: Path) -> None:
    _, recording = recorded(tmp_path, recorder)
    times = {call.id: 0 for call in recording.calls}
    for program in recording.programs:
        for number in program.calls:
            times[number] += sum(count.count for count in program.counts)
    assert times == {call.id: call.total for call in recording.calls}


@both
@pytest.mark.parametrize("fail", ["load", "0", "1000"])
def test_a_recorder_that_fails_is_switched_off_and_says_so(recorder: str, fail: str, tmp_path: Path) -> None:
    outputs, recording = recorded(tmp_path, recorder, fail=fail)
    assert outputs == EXPECTED
    (tap,) = (tap for tap in recording.metadata.taps if tap.status not in ("ok", "absent"))
    assert tap.status == "failed"
    assert "made to fail" in tap.detail
    assert not recording.metadata.complete
    steps = recording.metadata.steps.get("decode", 0)
    assert 25 <= steps <= 35 if fail == "1000" else steps == 0
    if steps:  # those that had ended before it failed are whole
        assert sum(call.total for call in recording.calls if call.operator == "aten::mm") == 10 * steps


@both
def test_the_window_closes_after_the_steps_asked_for(recorder: str, tmp_path: Path) -> None:
    outputs, recording = recorded(tmp_path, recorder, steps=3)
    assert outputs == EXPECTED
    assert recording.metadata.steps == {"decode": 3}
    assert recording.metadata.complete


@both
def test_calls_between_steps_count_too(recorder: str, record: Record, counted: Counted) -> None:
    def body(session: Any) -> None:
        torch.add(A, A)
        with session.step("prefill", [4, 2], [4, 2]):
            torch.mm(A, A)
        torch.add(A, A)
        with session.step("decode", [1, 1], [5, 3]):
            torch.mm(A, A)
        torch.add(A, A)

    recording = record(body, recorder)
    assert counted(recording) == {"aten::add.Tensor": 3, "aten::mm": 2}
    assert recording.metadata.steps == {"decode": 1, "prefill": 1}
    (mm,) = (call for call in recording.calls if call.operator == "aten::mm")
    assert {count.phase: count.count for count in mm.counts} == {"prefill": 1, "decode": 1}


@both
def test_a_step_ends_with_what_raises_in_it(recorder: str, record: Record, counted: Counted) -> None:
    def body(session: Any) -> None:
        with pytest.raises(KeyError), session.step("decode"):
            torch.mm(A, A)
            raise KeyError
        torch.add(A, A)
        with session.step("decode"):
            torch.mul(A, A)

    recording = record(body, recorder)
    assert counted(recording) == {"aten::mm": 1, "aten::add.Tensor": 1, "aten::mul.Tensor": 1}
    assert recording.metadata.steps == {"decode": 2}
    assert [len(program.calls) for program in recording.programs] == [1, 1], "what came between is of no step"


@both
def test_a_program_that_raises_is_recorded_until_then(recorder: str, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), torch.no_grad(), kcap.record(tmp_path / "out", recorder=recorder):
        torch.mm(A, A)
        raise ZeroDivisionError
    recording = kcap.load(tmp_path / "out")
    assert [(call.operator, call.total) for call in recording.calls] == [("aten::mm", 1)]
    assert recording.metadata.complete


def test_recording_twice_at_a_time_is_refused_and_harmless(record: Record, tmp_path: Path, counted: Counted) -> None:
    def body(_: Any) -> None:
        torch.add(A, A)
        with pytest.raises(CallError, match="recorded already, into"), kcap.record(tmp_path / "inner"):
            pass
        torch.add(A, A)

    assert counted(record(body)) == {"aten::add.Tensor": 2}
    assert not (tmp_path / "inner").exists()
    assert counted(record(lambda _: torch.mm(A, A))) == {"aten::mm": 1}


def test_an_existing_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CallError, match="force"), kcap.record(tmp_path / "out"):
        pass
    with kcap.record(tmp_path / "out", force=True):
        torch.mm(A, A)
    assert kcap.load(tmp_path / "out").calls
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unknown_phase_is_a_wrong_call(record: Record) -> None:
    def body(session: Any) -> None:
        with pytest.raises(CallError, match="prefill"), session.step("warmup"):
            pass

    record(body)


def test_a_stop_file_closes_the_window(tmp_path: Path) -> None:
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    window.start()
    assert window.begin(StepShape("decode", [1], [1]))
    window.end()
    session.stop_file.touch()
    deadline = time.monotonic() + 10
    while not all_closed(tmp_path / "shards") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not window.open
    assert not window.begin(StepShape("decode", [1], [1]))
    assert fold_session(session, tmp_path / "out").metadata.complete


NO_COMPILER = """
import sys
import torch, kcap
a = torch.eye(4)
with torch.no_grad(), kcap.record(sys.argv[1]):
    torch.mm(a, a)
"""


def test_without_a_compiler_the_fallback_records_and_says_why(python: Python, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": ""}
    ran = python(NO_COMPILER, tmp_path / "out", env=environment)
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(tmp_path / "out")
    assert recording.metadata.recorder == ["TorchDispatchMode"]
    assert "no C++ compiler" in recording.metadata.notes[0]
    assert [call.operator for call in recording.calls] == ["aten::mm"]


def test_a_compiler_that_fails_leads_to_the_fallback(python: Python, tmp_path: Path) -> None:
    (tmp_path / "bad-cxx").write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 1\n")
    (tmp_path / "bad-cxx").chmod(0o755)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(tmp_path / "bad-cxx")}
    ran = python(NO_COMPILER, tmp_path / "out", env=environment)
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(tmp_path / "out")
    assert "no such header" in recording.metadata.notes[0]
    assert [call.operator for call in recording.calls] == ["aten::mm"]


def test_the_recording_is_for_its_owner_only(record: Record) -> None:
    recording = record(lambda _: torch.mm(A, A))
    assert recording.path.stat().st_mode & 0o777 == 0o700


def test_the_shards_are_gone_once_the_recording_stands(record: Record) -> None:
    recording = record(lambda _: torch.mm(A, A))
    assert not (recording.path / "shards").exists()
    assert stems(recording.path / "shards") == []
    assert read_shard(recording.path / "shards" / "none").by_kind == {}


def test_many_recordings_of_one_process_leave_no_files_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped_counts() -> int:
        return Path("/proc/self/maps").read_text().count(".counts")

    with kcap.record(tmp_path / "first"):
        torch.ones(2)
    files, maps = open_files(), mapped_counts()
    for number in range(5):
        with kcap.record(tmp_path / f"{number}"):
            torch.ones(2)
    assert open_files() <= files
    assert mapped_counts() <= maps


def test_a_step_that_a_pause_falls_into_does_not_count(tmp_path: Path) -> None:
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    window.start()
    shape = StepShape("decode", [1], [5])
    window.begin(shape)
    torch.ones(2) + 1
    window.pause()
    window._set_paused(True)
    window._set_paused(False)
    assert not window.resume()
    window.begin(shape)
    torch.ones(2) + 1
    window.end()
    window.close()
    assert fold_session(session, tmp_path / "out").metadata.steps == {"decode": 1}


def test_a_window_that_opens_slowly_is_not_taken_for_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread looks several times before the recorder has started."""
    original = NativeRecorder.start

    def slow(self: NativeRecorder, loose: bool) -> None:
        original(self, loose)
        time.sleep(3 * WATCH_POLL)

    monkeypatch.setattr(NativeRecorder, "start", slow)
    with kcap.record(tmp_path / "out"), torch.no_grad():
        torch.mm(A, A)
    recording = kcap.load(tmp_path / "out")
    assert [call.total for call in recording.calls if call.operator == "aten::mm"] == [1]


def test_a_child_that_is_forked_while_a_thread_holds_the_window_does_not_wait_for_it(tmp_path: Path) -> None:
    session = Session(str(tmp_path / "shards"))
    session.write()
    window = Window(session)
    with window._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if window._lock.acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0

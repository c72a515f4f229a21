"""The window of a recording that runs: opened and closed from outside, after the same step in every process."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kcap.capture import windows
from kcap.capture.config import Session
from kcap.capture.gate import ENDING, HELD, PATIENCE, Gate, shared
from kcap.capture.merge import merge
from kcap.capture.told import NEVER_OPENED
from kcap.capture.window import StepShape, Window
from kcap.errors import KcapError
from kcap.schemas.recording import Recording

A = torch.eye(4)
SHAPE = StepShape("decode", [1], [5])
both = pytest.mark.parametrize("recorder", ["native", "python"])


def made(tmp_path: Path, **options: Any) -> Session:
    session = Session(str(tmp_path / "shards"), **options)
    session.write()
    return session


def opened(session: Session, loose: bool = False) -> Window:
    window = Window(session)
    window.register()
    window.start(loose)
    return window


def step(window: Window, times: int = 1) -> None:
    with torch.no_grad():
        for _ in range(times):
            window.begin(SHAPE)
            torch.mm(A, A)
            window.end()


def finished(window: Window, tmp_path: Path) -> Recording:
    window.close()
    return merge(window.session, tmp_path / "out")


def steps_and_calls(recording: Recording) -> tuple[int, int]:
    calls = sum(call.total for call in recording.calls if call.operator == "aten::mm")
    return sum(recording.metadata.steps.values()), calls


@both
def test_only_steps_in_an_open_window_count(recorder: str, tmp_path: Path) -> None:
    session = made(tmp_path, window="manual", recorder=recorder)
    window = opened(session)
    step(window, 3)
    assert windows.start(session) == windows.Answer(True, 1, [])
    step(window, 5)
    assert windows.stop(session) == windows.Answer(True, 1, [])
    step(window, 7)
    windows.start(session)
    step(window, 2)
    recording = finished(window, tmp_path)
    assert steps_and_calls(recording) == (7, 7)
    assert recording.metadata.windows == [{"first": 4, "steps": 5}, {"first": 16, "steps": 2}]
    assert [line.index for line in recording.steps] == list(range(7))
    assert recording.metadata.complete and NEVER_OPENED not in recording.metadata.notes


@both
def test_a_step_under_way_when_the_window_opens_or_closes_does_not_count(recorder: str, tmp_path: Path) -> None:
    session = made(tmp_path, window="manual", recorder=recorder)
    window = opened(session)
    with torch.no_grad():
        for change in (windows.start, windows.stop):
            window.begin(SHAPE)
            torch.mm(A, A)
            change(session)
            torch.mm(A, A)
            window.end()
            step(window, 4)
    recording = finished(window, tmp_path)
    assert steps_and_calls(recording) == (4, 4)


@both
def test_steps_go_on_exactly_after_one_that_the_stop_fell_into(recorder: str, tmp_path: Path) -> None:
    session = made(tmp_path, recorder=recorder)
    window = opened(session)
    window.begin(SHAPE)
    torch.exp(A)
    windows.stop(session)
    windows.start(session)
    window.end()
    step(window, 2)
    recording = finished(window, tmp_path)
    assert steps_and_calls(recording) == (2, 2)
    assert {call.operator for call in recording.calls} == {"aten::mm"}


def test_a_window_that_never_opened_is_told(tmp_path: Path) -> None:
    window = opened(made(tmp_path, window="manual"))
    step(window, 3)
    recording = finished(window, tmp_path)
    assert recording.metadata.notes == [NEVER_OPENED]
    assert not recording.calls and not recording.metadata.windows


def test_warm_up_steps_do_not_count_at_any_opening(tmp_path: Path) -> None:
    session = made(tmp_path, warmup_steps=3)
    window = opened(session)
    step(window, 5)
    windows.stop(session)
    step(window, 1)
    windows.start(session)
    step(window, 7)
    recording = finished(window, tmp_path)
    assert recording.metadata.windows == [{"first": 4, "steps": 2}, {"first": 10, "steps": 4}]
    assert steps_and_calls(recording) == (6, 6)


def test_a_limit_of_steps_is_of_all_windows_and_closes_for_good(tmp_path: Path) -> None:
    session = made(tmp_path, steps=4)
    window = opened(session)
    step(window, 3)
    windows.stop(session)
    windows.start(session)
    step(window, 3)
    with pytest.raises(KcapError, match="closed for good"):
        windows.stop(session)
    assert steps_and_calls(finished(window, tmp_path)) == (4, 4)


def test_calls_outside_steps_count_only_in_an_open_window(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    window = opened(session, loose=True)
    with torch.no_grad():
        torch.mm(A, A)
        windows.start(session)
        torch.mm(A, A)
        step(window)
        windows.stop(session)
        torch.mm(A, A)
    assert steps_and_calls(finished(window, tmp_path)) == (1, 2)


def test_a_step_that_a_pause_falls_into_leaves_the_window_as_it_was(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    window = opened(session)
    for paused in (True, False):
        window._set_paused(paused)
    step(window)
    assert not window.open
    windows.start(session)
    window._set_paused(True)
    step(window)
    window._set_paused(False)
    step(window)
    assert steps_and_calls(finished(window, tmp_path)) == (1, 1)


def test_a_process_that_starts_later_begins_as_the_window_is(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    assert windows.start(session) == windows.Answer(True, 0, [])
    assert not windows.start(session).changed
    window = opened(session)
    step(window, 2)
    assert steps_and_calls(finished(window, tmp_path)) == (2, 2)


# ---- several processes, which gates stand for ----


def gate(session: Session, process: int, replica: int = 0) -> Gate:
    path = Path(session.directory) / f"{os.uname().nodename}-{process}{ENDING}"
    made = Gate(path, replica)
    if session.opens:
        made.open(1)
    return made


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as processes might."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Rank(threading.Thread):
    """Steps at its own pace, at most two behind or before the other, and notes which of its steps counted."""

    def __init__(self, gate: Gate, seed: int) -> None:
        super().__init__(daemon=True)
        self.gate, self.counted, self.number, self.over = gate, set[int](), 0, False
        self.other: Rank | None = None
        self._draw = random.Random(seed)

    def run(self) -> None:
        while not self.over or (self.other is not None and self.number < self.other.number):
            if self.other is not None and self.number > self.other.number + 1 and not self.other.over:
                time.sleep(0)
                continue
            self.number += 1
            began = self.gate.begin()
            for _ in range(self._draw.randrange(200)):
                pass
            if began and self.gate.end():
                self.counted.add(self.number)
            self.gate.answer(self.gate.asked)


@pytest.mark.usefixtures("often")
def test_ranks_count_the_same_steps_whenever_the_window_opens_and_closes(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    ranks = [Rank(gate(session, process), process) for process in (os.getpid(), os.getppid())]
    ranks[0].other, ranks[1].other = ranks[1], ranks[0]
    for rank in ranks:
        rank.start()
    sizes = [0]
    for _ in range(60):
        assert windows.start(session).processes == 2
        time.sleep(random.random() * 0.002)
        assert windows.stop(session).processes == 2
        sizes.append(len(ranks[0].counted))
    for rank in ranks:
        rank.over = True
    for rank in ranks:
        rank.join(20)
    assert ranks[0].counted == ranks[1].counted
    assert len(set(sizes)) > 40, "most windows held steps"


def test_replicas_open_each_after_its_own_last_step(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    far, near = gate(session, os.getpid(), 0), gate(session, os.getppid(), 1)
    for _ in range(500):
        far.begin()
    near.begin()
    threading.Thread(target=lambda: [(time.sleep(0.2), far.answer(1), near.answer(1))], daemon=True).start()
    assert windows.start(session).processes == 2
    assert (far.first, near.first) == (501, 2)


def test_a_process_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "PATIENCE", 0.1)
    session = made(tmp_path)
    gate(session, os.getpid())
    answer = windows.stop(session)
    assert answer == windows.Answer(True, 0, [os.getpid()])
    assert f"0 of 1 processes follow; no answer from {os.getpid()}" in windows.said(answer, False)


def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    session = made(tmp_path)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    gate(session, child)
    assert windows.stop(session) == windows.Answer(True, 0, [])


def test_an_engine_does_not_wait_for_whoever_died_while_holding_its_gate(tmp_path: Path) -> None:
    session = made(tmp_path)
    mine = gate(session, os.getpid())
    cells = shared(Path(session.directory) / f"{os.uname().nodename}-{os.getpid()}{ENDING}")
    cells[HELD] = 1
    began = time.monotonic()
    assert mine.begin() and mine.end()
    assert PATIENCE < time.monotonic() - began < 20 * PATIENCE
    assert cells[HELD] == 0


# ---- which recording is meant ----


def test_where_no_recording_runs_the_error_says_what_is_there(tmp_path: Path, recording: Path) -> None:
    output = tmp_path / "[a].kcap"
    with pytest.raises(KcapError, match="start it first, with the same -o"):
        windows.find(output)
    left = tmp_path / ".[a].kcap.x1"
    (left / "shards").mkdir(parents=True)
    with pytest.raises(KcapError, match=r"interrupted, see kcap recover .*x1"):
        windows.find(output)
    with pytest.raises(KcapError, match="is a Recording already"):
        windows.find(recording)


def test_the_recording_that_runs_is_found_beside_what_others_left(tmp_path: Path) -> None:
    sessions = [Session(str(tmp_path / f".a.kcap.{name}" / "shards")) for name in ("x1", "x2")]
    for session in sessions:
        session.write()
        (Path(session.directory) / "running").touch()
    with windows.running(sessions[1]):
        assert windows.find(tmp_path / "a.kcap") == sessions[1]
        with windows.running(sessions[0]), pytest.raises(KcapError, match="end all but one"):
            windows.find(tmp_path / "a.kcap")
    with pytest.raises(KcapError, match="interrupted"):
        windows.find(tmp_path / "a.kcap")

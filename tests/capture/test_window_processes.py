"""The window of several processes, for which gates stand, and which recording is meant."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kcap.capture.controller import run, window_control
from kcap.capture.session import GATE_ENDING, Session
from kcap.capture.shards.counts import CLOSED, Counts, all_closed
from kcap.capture.window.gate import HELD, PATIENCE, Gate, open_cells
from kcap.capture.window.process import ALONE, replica_of
from kcap.errors import CallError, KcapError


def made(tmp_path: Path, **options: Any) -> Session:
    session = Session(str(tmp_path / "shards"), **options)
    session.write()
    return session


def gate(session: Session, process: int, replica: int = 0) -> Gate:
    path = Path(session.directory) / f"{os.uname().nodename}-{process}{GATE_ENDING}"
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
        assert window_control.open_window(session).processes == 2
        time.sleep(random.random() * 0.002)
        assert window_control.close_window(session).processes == 2
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
    assert window_control.open_window(session).processes == 2
    assert (far.first, near.first) == (501, 2)


def test_a_process_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_control, "PATIENCE", 0.1)
    session = made(tmp_path)
    gate(session, os.getpid())
    answer = window_control.close_window(session)
    assert answer == window_control.Answer(True, 0, [os.getpid()])
    assert f"0 of 1 processes follow; no answer from {os.getpid()}" in window_control.answer_text(answer, False)


def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    session = made(tmp_path)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    gate(session, child)
    assert window_control.close_window(session) == window_control.Answer(True, 0, [])


def test_a_program_that_its_process_replaced_is_neither_waited_for_nor_steered(tmp_path: Path) -> None:
    first = made(tmp_path)
    Counts(first.shard_file(".counts"), create=True)
    first.shard_file(".jsonl").touch()
    gate(first, os.getpid())
    second = first.after_another()
    assert second.shard().name == f"{first.shard().name}-program2"
    assert not [*Path(first.directory).glob(f"*{GATE_ENDING}")]
    assert not all_closed(Path(first.directory))
    Counts(second.shard_file(".counts"), create=True).cells[CLOSED] = 1
    assert all_closed(Path(first.directory))


def test_an_engine_does_not_wait_for_whoever_died_while_holding_its_gate(tmp_path: Path) -> None:
    session = made(tmp_path)
    mine = gate(session, os.getpid())
    cells = open_cells(Path(session.directory) / f"{os.uname().nodename}-{os.getpid()}{GATE_ENDING}")
    cells[HELD] = 1
    began = time.monotonic()
    assert mine.begin() and mine.end()
    assert PATIENCE < time.monotonic() - began < 30
    assert cells[HELD] == 0


# ---- the ranks that are behind when a recording is closed ----


def closing(session: Session, fast: Gate, slow: Gate, body: Callable[[], None]) -> float:
    """The seconds that `launch.close` takes after two ranks began a step, which only `fast` ended. `body`: what the
    slow one does meanwhile."""
    fast.begin()
    slow.begin()
    fast.end()

    def follow() -> None:
        while not fast.asked:
            time.sleep(0.001)
        fast.answer(fast.asked)
        slow.answer(slow.asked)
        body()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    began = time.monotonic()
    run.close_windows(session)
    took = time.monotonic() - began
    thread.join(20)
    return took


def test_a_rank_that_is_behind_ends_its_last_step_before_its_shard_is_closed(tmp_path: Path) -> None:
    session = made(tmp_path)
    fast, slow = gate(session, os.getpid()), gate(session, os.getppid())
    ended: list[tuple[bool, bool]] = []

    def end_late() -> None:
        time.sleep(0.7)
        ended.append((slow.end(), session.stop_file.exists()))

    closing(session, fast, slow, end_late)
    assert ended == [(True, False)]
    assert session.stop_file.exists()


@pytest.mark.parametrize(("patience", "in_step"), [("CATCH_UP", True), ("IDLE", False)])
def test_a_rank_that_is_stuck_is_not_waited_for_long(
    patience: str, in_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_control, patience, 0.5)
    session = made(tmp_path)
    fast, slow = gate(session, os.getpid()), gate(session, os.getppid())
    if not in_step:  # it comes to no other step
        fast.begin()
        fast.end()
    took = closing(session, fast, slow, lambda: None if in_step else slow.end() and None)
    assert 0.5 <= took < 9
    assert session.stop_file.exists()


def test_processes_that_are_no_ranks_of_one_world_are_not_held_against_each_other() -> None:
    alone = {"world_size": 1, "places": {"dp": 0}}
    child = os.fork()
    if not child:
        os._exit(replica_of(alone) == ALONE + os.getppid())
    assert os.waitpid(child, 0)[1] == 0
    assert replica_of(alone) == ALONE + os.getpid()
    assert replica_of({"world_size": 2, "places": {"dp": 1}}) == 1


# ---- which recording is meant ----


def test_where_no_recording_runs_the_error_says_what_is_there(tmp_path: Path, recording: Path) -> None:
    output = tmp_path / "[a].kcap"
    with pytest.raises(KcapError, match="start it first, with the same -o"):
        window_control.find_session(output)
    left = tmp_path / ".[a].kcap.x1"
    (left / "shards").mkdir(parents=True)
    with pytest.raises(KcapError, match=r"see kcap recover '\S*/\.\[a\]\.kcap\.x1' -o '\S*/\[a\]\.kcap'"):
        window_control.find_session(output)
    with pytest.raises(KcapError, match="is a Recording already"):
        window_control.find_session(recording)


def test_the_recording_that_runs_is_found_beside_what_others_left(tmp_path: Path) -> None:
    sessions = [Session(str(tmp_path / f".a.kcap.{name}" / "shards")) for name in ("x1", "x2")]
    for session in sessions:
        session.write()
        (Path(session.directory) / "running").touch()
    with window_control.marked_running(sessions[1]):
        assert window_control.find_session(tmp_path / "a.kcap") == sessions[1]
        with pytest.raises(CallError, match=rf"a.kcap is being written by process {os.getpid()}: "):
            window_control.refuse_written(tmp_path / "a.kcap")
    window_control.refuse_written(tmp_path / "a.kcap")
    with pytest.raises(KcapError, match="interrupted"):
        window_control.find_session(tmp_path / "a.kcap")


def test_a_child_that_outlives_a_killed_recording_does_not_keep_its_output(tmp_path: Path) -> None:
    session = Session(str(tmp_path / ".a.kcap.abcd_123" / "shards"))
    session.write()
    with window_control.marked_running(session):  # the lock that a forked child inherits
        ended = subprocess.Popen(["true"])
        ended.wait()
        (Path(session.directory) / "running").write_text(str(ended.pid))
        window_control.refuse_written(tmp_path / "a.kcap")


def test_a_recording_with_a_longer_name_is_not_meant(tmp_path: Path) -> None:
    session = Session(str(tmp_path / ".run.2.abcd_123" / "shards"))
    session.write()
    with window_control.marked_running(session):
        assert window_control.find_session(tmp_path / "run.2") == session
        with pytest.raises(KcapError, match="start it first"):
            window_control.find_session(tmp_path / "run")

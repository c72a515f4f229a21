"""The window of a process, opened and closed from outside: what runs in it counts, and nothing across its edges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kcap.capture.controller import window_control
from kcap.capture.fold.metadata import NEVER_OPENED
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.shards import counts
from kcap.capture.window.window import StepShape, Window
from kcap.errors import KcapError
from kcap.schemas.recording.recording import Recording

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
    return fold_session(window.session, tmp_path / "out")


def steps_and_calls(recording: Recording) -> tuple[int, int]:
    calls = sum(call.total for call in recording.calls if call.operator == "aten::mm")
    return sum(recording.metadata.steps.values()), calls


@both
def test_only_steps_in_an_open_window_count(recorder: str, tmp_path: Path) -> None:
    session = made(tmp_path, window="manual", recorder=recorder)
    window = opened(session)
    step(window, 3)
    assert window_control.open_window(session) == window_control.Answer(True, 1, [])
    step(window, 5)
    assert window_control.close_window(session) == window_control.Answer(True, 1, [])
    step(window, 7)
    window_control.open_window(session)
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
        for change in (window_control.open_window, window_control.close_window):
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
    window_control.close_window(session)
    window_control.open_window(session)
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
    window_control.close_window(session)
    step(window, 1)
    window_control.open_window(session)
    step(window, 7)
    recording = finished(window, tmp_path)
    assert recording.metadata.windows == [{"first": 4, "steps": 2}, {"first": 10, "steps": 4}]
    assert steps_and_calls(recording) == (6, 6)


def test_a_limit_of_steps_is_of_all_windows_and_closes_for_good(tmp_path: Path) -> None:
    session = made(tmp_path, steps=4)
    window = opened(session)
    step(window, 3)
    window_control.close_window(session)
    window_control.open_window(session)
    step(window, 3)
    with pytest.raises(KcapError, match="closed for good"):
        window_control.close_window(session)
    assert steps_and_calls(finished(window, tmp_path)) == (4, 4)


def test_calls_outside_steps_count_only_in_an_open_window(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    window = opened(session, loose=True)
    with torch.no_grad():
        torch.mm(A, A)
        window_control.open_window(session)
        torch.mm(A, A)
        step(window)
        window_control.close_window(session)
        torch.mm(A, A)
    assert steps_and_calls(finished(window, tmp_path)) == (1, 2)


@both
def test_steps_have_their_calls_in_a_window_that_kcap_s_own_thread_opened(recorder: str, tmp_path: Path) -> None:
    session = made(tmp_path, window="manual", recorder=recorder)
    window = opened(session, loose=True)
    window_control.open_window(session)
    step(window, 3)
    torch.exp(A)
    window_control.close_window(session)
    torch.exp(A)
    window_control.open_window(session)
    step(window, 2)
    recording = finished(window, tmp_path)
    assert steps_and_calls(recording) == (5, 5)
    assert [call.total for call in recording.calls if call.operator == "aten::exp"] == [1]


@both
@pytest.mark.parametrize("loose", [True, False])
def test_steps_that_take_turns_on_threads_have_their_calls_once(loose: bool, recorder: str, tmp_path: Path) -> None:
    window = opened(made(tmp_path, recorder=recorder), loose)
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            step(window, 2)
            other.submit(step, window, 2).result()
    recording = finished(window, tmp_path)
    assert steps_and_calls(recording) == (12, 12)
    assert [line.program for line in recording.steps] == [recording.programs[0].id] * 12


def test_a_step_that_a_pause_falls_into_leaves_the_window_as_it_was(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    window = opened(session)
    for paused in (True, False):
        window._set_paused(paused)
    step(window)
    assert not window.open
    window_control.open_window(session)
    window._set_paused(True)
    step(window)
    window._set_paused(False)
    step(window)
    assert steps_and_calls(finished(window, tmp_path)) == (1, 1)


def test_a_process_that_starts_later_begins_as_the_window_is(tmp_path: Path) -> None:
    session = made(tmp_path, window="manual")
    assert window_control.open_window(session) == window_control.Answer(True, 0, [])
    assert not window_control.open_window(session).changed
    window = opened(session)
    step(window, 2)
    assert steps_and_calls(finished(window, tmp_path)) == (2, 2)


@pytest.mark.parametrize("steps", [None, 4])
def test_the_window_outlasts_a_process_that_ended_before_the_engine_began(steps: int | None, tmp_path: Path) -> None:
    session = made(tmp_path, window="manual", steps=steps)
    opened(session).close()
    answer = window_control.open_window(session)
    assert answer == window_control.Answer(True, 0, [])
    assert "open when the engine is up" in window_control.answer_text(answer, True)
    counts.close_shards(session)
    with pytest.raises(KcapError, match="closed for good"):
        window_control.close_window(session)


def test_a_shard_of_an_engine_that_began_in_a_recorded_process_is_that_process_s(tmp_path: Path) -> None:
    shard = Session(str(tmp_path), part="-vllm").shard()
    assert not counts.has_ended(shard.with_name(shard.name + ".counts"))

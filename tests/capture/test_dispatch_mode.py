"""The fallback recorder: what goes wrong in it stays in it, and it sees one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kcap.capture.recorder.fallback_recorder import DispatchModeRecorder

X = torch.ones(2)
inner: list[Callable[[], object]] = []  # what a region does after its kernel


def _region(x: torch.Tensor) -> torch.Tensor:
    y = torch.ops.kcmode.leaf(x)
    for body in inner:
        body()
    return y


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("kcmode", "DEF") as lib, torch.no_grad():
        for name, function in (("leaf", lambda x: x * 2), ("region", _region)):
            lib.define(f"{name}(Tensor x) -> Tensor")
            lib.impl(name, function, "CPU")
        yield


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[DispatchModeRecorder]:
    made = DispatchModeRecorder(tmp_path / "shard")
    yield made
    inner.clear()
    made.close()


def fill_the_disk(recorder: DispatchModeRecorder) -> None:
    recorder._shard._path = Path("/dev/full")


def test_a_full_disk_at_the_end_of_a_region_does_not_reach_its_caller(recorder: DispatchModeRecorder) -> None:
    inner.append(lambda: fill_the_disk(recorder))
    recorder.start(loose=True)
    assert torch.ops.kcmode.region(X).tolist() == [2, 2]
    assert "No space left" in recorder.error


def test_a_full_disk_at_the_end_of_a_call_from_python_does_not_reach_its_caller(recorder: DispatchModeRecorder) -> None:
    library = recorder.operator("lib::call", ["x"], True)
    recorder.start(loose=True)
    assert recorder.call(library, -1, [X], True, False)
    torch.ops.kcmode.leaf(X)
    fill_the_disk(recorder)
    recorder.leave()
    assert "No space left" in recorder.error


def elsewhere(body: Callable[[], object]) -> object:
    """What `body` answers on a thread of its own."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(body()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.parametrize("loose", [True, False])
def test_calls_of_another_thread_are_not_counted(loose: bool, recorder: DispatchModeRecorder) -> None:
    library = recorder.operator("lib::call", ["x"], True)
    recorder.start(loose)
    recorder.step_begin(0)
    assert elsewhere(lambda: recorder.call(library, -1, [X], False, False)) is False
    assert recorder.call(library, -1, [X], False, False)
    assert len(recorder._program) == 1


def test_another_thread_ends_no_call_of_this_one(recorder: DispatchModeRecorder) -> None:
    library = recorder.operator("lib::call", ["x"], True)
    recorder.start(loose=True)
    assert recorder.call(library, -1, [X], True, False)
    elsewhere(recorder.leave)
    assert recorder._mode.stack == ["lib::call"]
    recorder.leave()
    recorder.leave()
    assert (recorder._mode.stack, recorder._mode.entered, recorder.error) == ([], [], "")


def test_a_call_that_a_step_ends_in_is_left(recorder: DispatchModeRecorder) -> None:
    library = recorder.operator("lib::call", ["x"], True)
    recorder.start(loose=False)
    recorder.step_begin(0)
    assert recorder.call(library, -1, [X], True, False)
    recorder.step_pause()
    recorder.leave()
    recorder.step_resume()
    assert recorder.call(library, -1, [X], False, True), "nothing is around it"


@pytest.mark.parametrize("region", [True, False])
def test_a_call_that_outlasts_its_step_does_not_fail_the_recorder(region: bool, recorder: DispatchModeRecorder) -> None:
    outer = recorder.operator("engine::outer", ["x"], True, region)
    recorder.start(loose=True)
    recorder.step_begin(0)
    assert recorder.call(outer, -1, [X], True, False)
    recorder.step_end(1, 1, b"")
    recorder.leave()
    assert (recorder.error, recorder._open) == ("", True)


def test_a_window_that_opens_in_a_step_has_no_thread_yet(recorder: DispatchModeRecorder) -> None:
    library = recorder.operator("lib::call", ["x"], True)
    recorder.step_begin(0)
    recorder.start(loose=False)
    assert not recorder.call(library, -1, [X], False, False)


def test_an_operator_that_ends_after_another_thread_took_over_changes_nothing_there(
    recorder: DispatchModeRecorder,
) -> None:
    def take_over() -> None:
        recorder.step_begin(0)
        torch.ops.kcmode.leaf(X)
        torch.ops.kcmode.leaf(X)

    recorder.start(loose=True)
    inner.append(lambda: elsewhere(take_over))
    torch.ops.kcmode.region(X)
    torch.ops.kcmode.leaf(X)
    assert len(recorder._program) == 2
    assert recorder._mode.stack == []

"""Holding the GPU back, on a kernel that only notes what it is asked."""

from __future__ import annotations

import re

import pytest
import torch

from kcap.replay.timing import blocking, rotation
from kcap.replay.timing.blocking import (
    RELEASED_WORD,
    SPIN_SOURCE,
    SPIN_TIMEOUT_MS,
    TIMED_OUT_WORD,
    SleepBlocker,
    SpinBlocker,
)


class Kernel:
    """Notes the state at each launch; with `gives_up`, writes what a kernel does whose time was up."""

    def __init__(self, gives_up: bool = False) -> None:
        self.gives_up = gives_up
        self.launches: list[list[int]] = []

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: list[object]) -> None:
        state, timeout = args
        assert (grid, block, timeout) == ((1, 1, 1), (1, 1, 1), SPIN_TIMEOUT_MS)
        assert isinstance(state, torch.Tensor)
        self.launches.append(state.tolist())
        if self.gives_up:
            state[TIMED_OUT_WORD] = 1


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    noted: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", noted.append, raising=False)
    return noted


def test_the_kernel_starts_locked_and_is_released() -> None:
    kernel, state = Kernel(), torch.zeros(2, dtype=torch.int32)
    blocker = SpinBlocker(kernel, state)
    for _ in range(3):
        blocker.block()
        assert state[RELEASED_WORD] == 0
        blocker.unblock()
        assert state[RELEASED_WORD] == 1
    assert kernel.launches == [[0, 0]] * 3
    assert not blocker.timed_out


def test_after_it_gave_up_the_gpu_sleeps_instead_until_the_next_call(sleeps: list[int]) -> None:
    kernel = Kernel(gives_up=True)
    blocker = SpinBlocker(kernel, torch.zeros(2, dtype=torch.int32))
    blocker.block()
    blocker.unblock()
    assert blocker.timed_out
    blocker.block()
    assert (len(kernel.launches), len(sleeps)) == (1, 1)
    blocker.reset()
    kernel.gives_up = False
    blocker.block()
    assert (len(kernel.launches), blocker.timed_out) == (2, False)


@pytest.mark.parametrize("error", [RuntimeError("NVRTC error"), OSError("no libnvrtc"), None])
def test_without_a_compiler_the_gpu_sleeps(monkeypatch: pytest.MonkeyPatch, sleeps: list[int], error) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail if error else None, raising=False)
    blocker = blocking.gpu_blocker.__wrapped__("cuda:0")
    assert type(blocker) is SleepBlocker
    blocker.block()
    assert sleeps == [blocking.DELAY_CYCLES]


def test_the_source_reads_the_released_word_and_says_when_it_gives_up() -> None:
    assert re.search(rf"state\[{RELEASED_WORD}\] == 0", SPIN_SOURCE)
    assert re.search(rf"state\[{TIMED_OUT_WORD}\] = 1", SPIN_SOURCE)
    assert "volatile int* state" in SPIN_SOURCE


def test_the_runtime_is_the_one_that_the_process_has_loaded(tmp_path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 0 08:01 1  /nowhere/libcudart.so.12\n7f2-7f3 r-xp 0 08:01 2  /lib/libc.so.6\n")
    assert rotation.cuda_runtime.__wrapped__(maps) is None


def test_where_there_is_no_cuda_nothing_is_reset() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert rotation.reset_l2_persistence() is False

"""The order of steps on a GPU, on a torch.cuda that only notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.replay.inputs import Inputs
from kcap.replay.timing import cuda
from kcap.replay.timing.stop import Budget

MIB = 1 << 20


class FakeCuda:
    """Notes synchronizations, captures and calls; an event pair always took 2 ms."""

    def __init__(self, waits: bool = False, captures: bool = True) -> None:
        self.waits, self.captures = waits, captures
        self.log: list[str] = []
        self.debug = "default"

    def operator(self, number: int) -> None:
        self.log.append(f"call {number}")
        if self.waits and self.debug == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def graph(self) -> SimpleNamespace:
        def end() -> None:
            self.log.append("end")
            if not self.captures:
                raise RuntimeError("operation failed due to a previous error during capture")

        def begin(capture_error_mode: str) -> None:
            self.log.append("begin")

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=lambda: self.log.append("replay"))

    def mode(self, mode: str) -> None:
        self.debug = mode

    def event(self, enable_timing: bool) -> SimpleNamespace:
        return SimpleNamespace(record=lambda s: None, synchronize=lambda: None, elapsed_time=lambda other: 2.0)


Install = Callable[[FakeCuda], Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(fake: FakeCuda) -> FakeCuda:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        names = {
            "CUDAGraph": fake.graph,
            "Event": fake.event,
            "set_sync_debug_mode": fake.mode,
            "synchronize": lambda *_: fake.log.append("synchronize"),
            "stream": lambda s: nullcontext(),
            "current_stream": lambda device: stream,
            "_sleep": lambda cycles: fake.log.append("sleep"),
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(cuda, "timing_stream", lambda device: stream)
        monkeypatch.setattr(cuda, "l2_bytes", lambda device: 50 * MIB)
        return fake

    return put


def sets(count: int) -> list[Inputs]:
    return [Inputs([number], {}, {}) for number in range(count)]


def run(fake: FakeCuda, count: int, set_bytes: int) -> Any:
    restores: list[int] = []
    timing = cuda.time_cuda(fake.operator, sets(count), set_bytes, lambda: restores.append(1), Budget(0, 0), "cuda:0")
    assert restores
    return timing


def test_a_graph_goes_round_all_sets_equally_often(install: Install) -> None:
    fake = install(FakeCuda())
    timing = run(fake, 3, 100 * MIB)
    captured = fake.log[fake.log.index("begin") + 1 : fake.log.index("end")]
    assert timing.method == "graph"
    assert timing.cache == "cold"
    assert len(captured) == timing.n == 3  # one invocation takes the millisecond, each set gets its turn
    assert sorted(captured) == ["call 0", "call 1", "call 2"]
    assert timing.samples_us == [pytest.approx(2000 / 3)]


def test_little_data_stays_in_the_l2_and_is_called_warm(install: Install) -> None:
    assert run(install(FakeCuda()), 2, MIB).cache == "warm"


def test_an_operator_that_waits_is_never_captured(install: Install) -> None:
    fake = install(FakeCuda(waits=True))
    timing = run(fake, 1, MIB)
    assert "begin" not in fake.log
    assert (timing.method, timing.n, timing.spoiled) == ("events", 1, False)
    assert timing.notes == ["no CUDA graph: called a synchronizing CUDA operation"]
    assert fake.debug == "default"


def test_a_failed_capture_falls_back_and_asks_for_a_new_process(install: Install) -> None:
    timing = run(install(FakeCuda(captures=False)), 1, MIB)
    assert (timing.method, timing.spoiled) == ("events", True)
    assert "previous error during capture" in timing.notes[0]


@pytest.mark.parametrize(
    ("set_bytes", "free", "count"),
    [(50 * MIB, 100 << 30, 5), (1 << 30, 100 << 30, 1), (64, 100 << 30, cuda.MOST_SETS), (50 * MIB, 400 * MIB, 2)],
)
def test_sets_fill_five_times_the_l2_within_memory(install: Install, set_bytes: int, free: int, count: int) -> None:
    install(FakeCuda())
    assert cuda.sets_needed(set_bytes, free, "cuda:0") == count


@pytest.mark.parametrize(
    ("estimate", "sets", "count"), [(2.0, 1, 501), (2.0, 100, 600), (5000.0, 1, 1), (0.0, 7, 2002)]
)
def test_a_graph_lasts_a_millisecond(estimate: float, sets: int, count: int) -> None:
    assert cuda.nodes(estimate, sets) == count

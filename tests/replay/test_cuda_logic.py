"""The order of steps on a GPU, on a torch.cuda that only notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handmade import call, tensor

from kcap.replay import memory
from kcap.replay.bind import bind
from kcap.replay.inputs import Inputs, build, clone
from kcap.replay.layout import Target
from kcap.replay.operators import resolve
from kcap.replay.runner import Runner
from kcap.replay.timing import clock, cuda
from kcap.replay.timing.clock import uses_gpu
from kcap.replay.timing.stop import Budget
from kcap.schemas.measurement import AT_FLOOR, NOTHING
from kcap.schemas.recording import Argument, Call

MIB = 1 << 20


class FakeCuda:
    """Notes synchronizations, captures and calls; every event pair took `elapsed_ms`."""

    def __init__(self, waits: bool = False, captures: bool = True, elapsed_ms: float = 2.0) -> None:
        self.waits, self.captures, self.elapsed_ms = waits, captures, elapsed_ms
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
        return SimpleNamespace(
            record=lambda s: None, synchronize=lambda: None, elapsed_time=lambda other: self.elapsed_ms
        )


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
        monkeypatch.setattr(cuda, "floor_us", lambda device: {"graph": 1.0, "events": 3.0})
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
    ("elapsed_ms", "method", "median_us", "notes"),
    [
        (0.004, "none", 0.0, [NOTHING]),  # 4 µs of an empty graph's launch, over 250 nodes
        (0.250, "graph", 1.0, [AT_FLOOR]),
        (0.525, "graph", 2.1, []),
    ],
)
def test_an_empty_graph_is_no_time_and_a_tiny_kernel_is_at_the_floor(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    elapsed_ms: float,
    method: str,
    median_us: float,
    notes: list[str],
) -> None:
    monkeypatch.setattr(cuda, "nodes", lambda estimate, sets: 250)
    timing = run(install(FakeCuda(elapsed_ms=elapsed_ms)), 1, MIB)
    assert (timing.method, timing.notes, timing.floor_us) == (method, notes, 1.0)
    assert timing.samples_us == [pytest.approx(median_us)]


def test_the_floor_is_that_of_a_real_kernel_by_both_methods(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = cuda.floor_us.__wrapped__
    fake = install(FakeCuda())
    cell = torch.zeros(1)
    monkeypatch.setattr(torch, "zeros", lambda size, device: cell)
    floors = measure("cuda:0")
    assert floors == {"graph": pytest.approx(2000 / cuda.nodes(2000, 1)), "events": 2000.0}
    assert fake.log.count("replay") == 1 + cuda.FLOOR_SAMPLES
    assert int(cell) > cuda.FLOOR_SAMPLES


@pytest.mark.parametrize(
    ("set_bytes", "touched", "free", "count"),
    [
        (50 * MIB, 50 * MIB, 100 << 30, 5),
        (1 << 30, 1 << 30, 100 << 30, 1),
        (64, 64, 100 << 30, 1),  # can never leave the L2: one set, which is warm
        (50 * MIB, 50 * MIB, 400 * MIB, 1),
        (MIB, MIB // 8, 100 << 30, 2000),  # an eighth of each page is written
        (33 * MIB, MIB // 8, 100 << 30, 1),
    ],
)
def test_one_round_touches_five_times_the_l2_or_stays_in_it(
    install: Install, set_bytes: int, touched: int, free: int, count: int
) -> None:
    install(FakeCuda())
    assert cuda.sets_needed(set_bytes, touched, free, "cuda:0") == count


@pytest.mark.parametrize(
    ("places", "extra", "gpu"),
    [
        (["cpu"], [], False),
        (["cpu", "cuda:0"], [], True),
        (["cpu"], [torch.device("cuda:0")], True),
        (["cpu"], [torch.device("cpu")], False),
        ([], [3], False),
    ],
)
def test_a_call_of_host_tensors_alone_is_the_hosts(places: list[str], extra: list[object], gpu: bool) -> None:
    buffers = {(place, number): torch.zeros(0) for number, place in enumerate(places)}
    assert uses_gpu(Inputs(extra, {}, buffers)) is gpu


def test_host_work_of_a_gpu_recording_is_timed_by_the_host_and_names_the_processor(no_gpu_calls: None) -> None:
    specs = [tensor(16, dtype="int32", storage=n) for n in range(3)]
    args = [Argument(value=specs[0]), Argument(value=specs[1]), Argument(name="out", value=specs[2], keyword=True)]
    call = Call(id=0, operator="aten::add.out", args=args)
    answer = Runner("cuda:0", "cuda", None).run(call, None, 0.001)
    assert answer["status"] == "ok", answer
    assert (answer["method"], answer["device"], answer["clocks"]) == ("host", "cpu", None)
    assert answer["threads"] and answer["device_name"]
    assert answer["median_us"] > 0.05


@pytest.fixture
def no_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with room, that must not be given anything to do."""
    room = memory.free
    monkeypatch.setattr(memory, "free", lambda device: 100 << 30 if device == "cuda:0" else room(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    monkeypatch.setattr(clock, "time_cuda", lambda *_: pytest.fail("timed on the GPU"))


@pytest.mark.parametrize(
    ("device", "waits", "pinned"), [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)]
)
def test_the_host_end_of_an_asynchronous_copy_is_pinned(
    monkeypatch: pytest.MonkeyPatch, device: str, waits: bool, pinned: bool
) -> None:
    made: list[tuple[str, bool]] = []

    def empty(size: int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        made.append((device, pin_memory))
        return torch.zeros(size, dtype=dtype)

    copy = call("aten::copy_", tensor(16, device="cuda"), tensor(16, storage=1), waits)
    bound = bind(copy, None, resolve("aten::copy_").schema, lambda _: None)
    monkeypatch.setattr(torch, "empty", empty)
    first = build(bound, Target(device, "cuda"))
    clone(bound, Target(device, "cuda"), first)
    on_gpu = (device, False)
    assert made == [on_gpu, ("cpu", pinned), on_gpu, ("cpu", pinned)]


@pytest.mark.parametrize(
    ("estimate", "sets", "count"), [(2.0, 1, 501), (2.0, 100, 600), (5000.0, 1, 1), (0.0, 7, 2002)]
)
def test_a_graph_lasts_a_millisecond(estimate: float, sets: int, count: int) -> None:
    assert cuda.nodes(estimate, sets) == count

"""The order of steps on a GPU, on a torch.cuda that only notes what it is asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handmade import call, tensor
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.calls.runner import Runner
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import Target, build_inputs, clone_inputs
from kcap.replay.rebuild.operators import resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.timing import clock, graphs, rotation
from kcap.replay.timing.blocking import SleepBlocker
from kcap.replay.timing.clock import uses_gpu
from kcap.replay.timing.rotation import Rotation, RoundRobin, SetSize
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, WAITS_FOR_GPU, Budget
from kcap.schemas.derive.bound_call import BoundCall, Inputs, bind_call
from kcap.schemas.recording.recording import Argument, Call
from kcap.schemas.results.measurement import AT_FLOOR, NOTHING, Cache

MIB = 1 << 20
ONE = Budget(0, 0)  # sample


class FakeHold(SleepBlocker):
    """Notes when the GPU is held back; gives up, if it is told to."""

    def __init__(self, log: list[str], gives_up: bool) -> None:
        self.log, self.gives_up = log, gives_up

    def reset(self) -> None:
        self.timed_out = False

    def block(self) -> None:
        self.log.append("hold")

    def unblock(self) -> None:
        self.log.append("release")
        self.timed_out = self.gives_up


class FakeCuda:
    """Notes synchronizations, captures and calls; every event pair took `elapsed_ms`, or each call in it `call_us`."""

    def __init__(
        self,
        waits: bool = False,
        captures: bool = True,
        elapsed_ms: float = 2.0,
        gives_up: bool = False,
        call_us: float | None = None,
    ) -> None:
        self.waits, self.captures, self.elapsed_ms, self.call_us = waits, captures, elapsed_ms, call_us
        self.queued = self.ran = 0  # calls, in graphs or not, and those that were not only captured
        self.log: list[str] = []
        self.debug = "default"
        self.unused = 100 << 30
        self.blocker = FakeHold(self.log, gives_up)

    def operator(self, number: int) -> None:
        self.log.append(f"call {number}")
        self.queued += 1
        self.ran += 1
        if self.waits and self.debug == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def graph(self) -> SimpleNamespace:
        nodes = 0

        def end() -> None:
            nonlocal nodes
            self.log.append("end")
            if not self.captures:
                raise RuntimeError("operation failed due to a previous error during capture")
            nodes += self.queued
            self.ran -= nodes

        def begin(capture_error_mode: str) -> None:
            nonlocal nodes
            self.log.append("begin")
            nodes = -self.queued

        def replay() -> None:
            self.ran += nodes
            self.replay()

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)

    def replay(self) -> None:
        self.log.append("replay")

    def mode(self, mode: str) -> None:
        self.debug = mode

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(synchronize=lambda: None)
        made.record = lambda s: setattr(made, "at", self.ran)
        made.elapsed_time = lambda end: (
            self.elapsed_ms if self.call_us is None else (end.at - made.at) * self.call_us / 1e3
        )
        return made


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
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        for module in (clock, graphs):
            monkeypatch.setattr(module, "timing_stream", lambda device: stream)
        for module in (clock, rotation):
            monkeypatch.setattr(module, "l2_bytes", lambda device: 50 * MIB)
        monkeypatch.setattr(clock, "gpu_blocker", lambda device: fake.blocker)
        cool_down = SimpleNamespace(wait=lambda: fake.log.append("rest"))
        monkeypatch.setattr(clock, "CoolDown", lambda device: cool_down)
        monkeypatch.setattr(clock, "sweeper", lambda device: lambda: fake.log.append("sweep"))
        monkeypatch.setattr(clock, "clock_floor_us", lambda device: {"graph": 1.0, "events": 3.0})
        monkeypatch.setattr(clock, "reset_l2_persistence", lambda: fake.log.append("reset"))
        monkeypatch.setattr(memory, "free_bytes", lambda device: 100 << 30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.unused, 140 << 30))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.log.append("empty"))
        return fake

    return put


def run(
    fake: FakeCuda,
    set_bytes: int,
    state: Cache = "cold",
    restored: torch.Tensor | None = None,
    budget: Budget = ONE,
    cold: bool | None = None,
) -> Any:
    """Time the fake's operator, each set of whose inputs has so many bytes; clones are numbered from 1."""
    made = count(1)
    buffers = {("cpu", 0): torch.zeros(4, dtype=torch.uint8) if restored is None else restored}
    first = Inputs([0], {}, buffers)
    far = state != "warm" if cold is None else cold
    rotation = Rotation(state, SetSize(set_bytes, set_bytes), far, lambda: Inputs([next(made)], {}, dict(buffers)))
    keys = [] if restored is None else [("cpu", 0)]
    return clock.time_cuda(fake.operator, first, rotation, keys, budget, "cuda:0")


def captured(fake: FakeCuda) -> list[str]:
    """The calls of the last graph."""
    begin, end = (len(fake.log) - fake.log[::-1].index(word) for word in ("begin", "end"))
    return fake.log[begin : end - 1]


def writing_to(written: torch.Tensor, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each replay writes to its input: what they found there."""
    found: list[int] = []

    def replay() -> None:
        found.append(int(written[0]))
        written.add_(1)

    monkeypatch.setattr(fake, "replay", replay)
    return found


def returning_tensors(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[weakref.ref[torch.Tensor]], list[int]]:
    """The operator returns a new tensor each time: these, and how many of the earlier ones each call found alive."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def operator(number: int) -> torch.Tensor:
        FakeCuda.operator(fake, number)
        alive.append(sum(one() is not None for one in made))
        result = torch.zeros(16)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(fake, "operator", operator)
    return made, alive


def test_a_graph_goes_round_all_sets_equally_often(install: Install) -> None:
    fake = install(FakeCuda(call_us=12.5))  # 80 take the millisecond
    timing = run(fake, 60 * MIB)
    assert (timing.method, timing.cache, timing.input_sets, timing.n) == ("graph", "cold", 24, 96)
    assert all(captured(fake).count(f"call {number}") == 4 for number in range(24))
    assert timing.samples_us == [pytest.approx(12.5)]


def test_a_first_graph_goes_once_round_all_sets_as_they_will_be_timed(install: Install) -> None:
    fake = install(FakeCuda(call_us=12.5))
    run(fake, 60 * MIB)
    begin, end = fake.log.index("begin"), fake.log.index("end")
    assert fake.log[begin + 1 : end] == [f"call {number}" for number in range(24)]
    rest = fake.log[end + 1 :]
    tries = rest[rest.index("replay") + 1 : rest.index("begin")]  # the first replay uploads it
    assert [word for word in tries if word in ("sweep", "replay")] == ["sweep", "replay"] * clock.ESTIMATE_ROUNDS


def test_a_disturbed_round_does_not_shorten_the_graph(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(FakeCuda(call_us=12.5))
    slow = iter([12.5, 100.0])  # of its upload, and of the first round
    monkeypatch.setattr(fake, "replay", lambda: setattr(fake, "call_us", next(slow, 12.5)))
    assert run(fake, 60 * MIB).n == 96


def test_no_result_of_the_first_graph_lives_on_in_the_second(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(FakeCuda(call_us=12.5))
    _, alive = returning_tensors(fake, monkeypatch)
    assert run(fake, 60 * MIB).n == 96
    assert alive[-96] == 0 and max(alive[-96:]) > 0


def test_what_is_written_is_put_back_between_two_graphs(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, written = install(FakeCuda(call_us=12.5)), torch.zeros(4, dtype=torch.uint8)
    found = writing_to(written, fake, monkeypatch)
    timing = run(fake, 60 * MIB, restored=written)
    uploads = (0, clock.ESTIMATE_ROUNDS + 1)
    assert timing.n == 96 and [one for place, one in enumerate(found) if place not in uploads] == [0] * (
        clock.ESTIMATE_ROUNDS + 1
    )


@pytest.mark.parametrize("alone_us", [10.3, 10.5])
def test_a_graphs_length_goes_by_the_time_of_a_call_in_its_turns(
    install: Install, monkeypatch: pytest.MonkeyPatch, alone_us: float
) -> None:
    """With one set in the caches it is faster, near the border of two lengths in one process and in the next."""
    fake = install(FakeCuda(call_us=alone_us))
    monkeypatch.setattr(fake, "replay", lambda: setattr(fake, "call_us", 13.3))
    timing = run(fake, 60 * MIB)
    assert (timing.n, timing.samples_us) == (96, [pytest.approx(13.3)])


def test_a_sweep_before_each_replay_and_outside_the_window_makes_small_inputs_cold(install: Install) -> None:
    fake = install(FakeCuda(call_us=12.5))
    timing = run(fake, MIB)
    assert (timing.cache, timing.input_sets, timing.n) == ("cold", 96, 96)  # each set is used once a replay
    assert len(set(captured(fake))) == 96
    assert fake.log[-6:] == ["rest", "sweep", "hold", "replay", "release", "synchronize"]


def test_what_is_written_is_put_back_before_each_sample(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, written = install(FakeCuda()), torch.zeros(4, dtype=torch.uint8)
    found = writing_to(written, fake, monkeypatch)
    timing = run(fake, MIB, "warm", written, Budget(0.0, 0.02))
    assert found[1:] == [0] * len(timing.samples_us) and len(found) > 5  # the first uploads the graph


@pytest.mark.parametrize(("size", "sets"), [(60 * MIB, 1), (64, 64), (0, 1)])
@pytest.mark.parametrize("state", ["warm", "serving"])
def test_what_stays_is_at_a_few_places_and_nothing_sweeps_it_away(
    install: Install, state: Cache, size: int, sets: int
) -> None:
    fake = install(FakeCuda(call_us=12.5))
    timing = run(fake, size, state, cold=False)
    assert (timing.cache, timing.input_sets) == (state, sets)
    assert timing.n % sets == 0 and len(set(captured(fake))) == sets
    assert "sweep" not in fake.log
    assert fake.log.count("begin") == (2 if sets > 1 else 1)  # of one set the time is known


def test_the_persisting_part_of_the_l2_is_given_back_first(install: Install) -> None:
    fake = install(FakeCuda())
    run(fake, MIB)
    assert fake.log[0] == "reset"


def test_an_operator_that_waits_is_never_captured_and_the_gpu_is_not_held_back_from_it(install: Install) -> None:
    """Held back by a kernel that waits for the host, it would wait for the GPU for ever."""
    fake = install(FakeCuda(waits=True))
    timing = run(fake, MIB)
    assert "begin" not in fake.log
    assert "hold" not in fake.log
    assert (timing.method, timing.n, timing.poisoned) == ("events", 1, False)
    assert timing.notes == ["no CUDA graph: called a synchronizing CUDA operation", WAITS_FOR_GPU]
    assert fake.debug == "default"


@pytest.mark.parametrize(("unused", "times"), [(100 << 30, 0), (40 << 30, 1)])
def test_memory_that_only_other_graphs_could_use_is_given_back_before_a_capture(
    install: Install, unused: int, times: int
) -> None:
    fake = install(FakeCuda(call_us=12.5))
    fake.unused = unused
    run(fake, 60 * MIB)
    begins = [place for place, word in enumerate(fake.log) if word == "begin"]
    empties = [place for place, word in enumerate(fake.log) if word == "empty"]
    assert len(begins) == 2 and [sum(empty < begin for empty in empties) for begin in begins] == [times, 2 * times]


def test_a_failed_capture_is_timed_behind_a_held_gpu_and_asks_for_a_new_process(install: Install) -> None:
    fake = install(FakeCuda(captures=False, elapsed_ms=0.1))
    timing = run(fake, 60 * MIB)
    assert (timing.method, timing.n, timing.poisoned) == ("events", 64, True)
    assert "previous error during capture" in timing.notes[0]
    assert not {BLOCKER_TIMED_OUT, WAITS_FOR_GPU} & set(timing.notes)
    last = len(fake.log) - fake.log[::-1].index("hold") - 1
    assert fake.log[last - 1] == "sweep"
    assert all(entry.startswith("call") for entry in fake.log[last + 1 : last + 65])
    assert fake.log[last + 65] == "release"


@pytest.mark.parametrize(("call_us", "n"), [(12.5, 64), (100.0, 12), (500.0, 3), (2000.0, 1)])
def test_what_cannot_be_captured_is_queued_for_a_millisecond(install: Install, call_us: float, n: int) -> None:
    """The GPU's queue takes so many launches: one call may be dozens."""
    assert run(install(FakeCuda(captures=False, call_us=call_us)), 60 * MIB).n == n


def test_a_holding_kernel_that_gave_up_is_told(install: Install) -> None:
    timing = run(install(FakeCuda(captures=False, gives_up=True)), MIB)
    assert timing.notes[1] == BLOCKER_TIMED_OUT


def test_the_gpu_is_let_go_even_if_the_timed_call_fails(install: Install) -> None:
    fake = install(FakeCuda())

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        graphs.timed_us(fail, 1, graphs.do_nothing, SimpleNamespace(), fake.blocker)  # type: ignore[arg-type]
    assert fake.log == ["hold", "release"]


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
    for module in (clock, rotation):
        monkeypatch.setattr(module, "graph_length", lambda estimate, sets: 250)
    timing = run(install(FakeCuda(elapsed_ms=elapsed_ms)), MIB, "warm")
    assert (timing.method, timing.notes, timing.floor_us) == (method, notes, 1.0)
    assert timing.samples_us == [pytest.approx(median_us)]


def test_the_floor_is_that_of_a_real_kernel_by_both_methods(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = clock.clock_floor_us.__wrapped__
    fake = install(FakeCuda())
    cell = torch.zeros(1)
    monkeypatch.setattr(torch, "zeros", lambda size, device: cell)
    floors = measure("cuda:0")
    assert floors == {"graph": 2000 / rotation.graph_length(2000, 1), "events": 2000 / clock.MAX_QUEUED}
    assert fake.log.count("replay") == 1 + clock.FLOOR_SAMPLES
    assert int(cell) > clock.FLOOR_SAMPLES


@pytest.mark.parametrize(
    ("total", "touched", "estimate", "free", "sets"),
    [
        (50 * MIB, 50 * MIB, 20.0, 100 << 30, 24),  # five are cold, more lie at more places
        (25 * MIB, 25 * MIB, 20.0, 100 << 30, 24),
        (8 * MIB, 8 * MIB, 20.0, 100 << 30, 32),
        (50 * MIB, 50 * MIB, 20.0, 1200 * MIB, 6),
        (50 * MIB, 50 * MIB, 12.0, 1000 * MIB, 5),
        (1 << 30, 1 << 30, 500.0, 100 << 30, 12),
        (2200 * MIB, 46 * MIB, 20.0, 100 << 30, 7),  # of 512 experts a token touches some
        (50 * MIB, 50 * MIB, 500.0, 100 << 30, 12),  # more would last too long
        (1 << 30, 1 << 30, 1e5, 100 << 30, 1),
        (64, 64, 2.0, 100 << 30, 512),  # each once a replay, with a sweep between two
        (50 * MIB, 50 * MIB, 20.0, 400 * MIB, 1),  # two of the five fit, and 40 µs are too short a replay
        (50 * MIB, 50 * MIB, 60.0, 400 * MIB, 2),
        (MIB, MIB // 8, 0.1, 100 << 30, 2048),  # an eighth of each page is written
        (33 * MIB, MIB // 8, 2.0, 100 << 30, 496),
        (0, 0, 2.0, 100 << 30, 1),
    ],
)
def test_there_are_as_many_sets_as_make_them_cold_and_fit(
    install: Install, total: int, touched: int, estimate: float, free: int, sets: int
) -> None:
    install(FakeCuda())
    made = Rotation("cold", SetSize(total, touched), True, lambda: Inputs([], {}, {}))
    assert made.set_count(estimate, 0, free, "cuda:0") == sets


@pytest.mark.parametrize(
    ("total", "touched", "estimate", "free", "sets"),
    [
        (64, 64, 2.0, 100 << 30, 64),
        (MIB, MIB, 2.0, 100 << 30, 12),  # a quarter of the L2 holds them all
        (33 * MIB, MIB // 8, 2.0, 100 << 30, 15),  # half a gigabyte
        (33 * MIB, MIB // 8, 2.0, 1 << 30, 7),
        (64, 64, 500.0, 100 << 30, 12),
        (20 * MIB, 20 * MIB, 2.0, 100 << 30, 1),
        (0, 0, 2.0, 100 << 30, 1),
    ],
)
@pytest.mark.parametrize("state", ["warm", "serving"])
def test_what_stays_in_the_l2_lies_at_as_many_places_as_it_holds(
    install: Install, state: Cache, total: int, touched: int, estimate: float, free: int, sets: int
) -> None:
    install(FakeCuda())
    made = Rotation(state, SetSize(total, touched), False, lambda: Inputs([], {}, {}))
    assert made.set_count(estimate, 0, free, "cuda:0") == sets
    assert (made.cache_state(sets, 500, "cuda:0"), made.rotating) == (state, 0)


@pytest.mark.parametrize(
    ("state", "whole", "kept", "cold", "moved"),
    [
        ("warm", 80, 40, False, 80),
        ("cold", 80, 40, True, 80),
        ("serving", 80, 79, True, 79),
        ("serving", 80, 68, True, 68),  # activations of 12 MiB: a quarter of the L2 holds them
        ("serving", 80, 67, True, 80),  # more: they go round, too
        ("serving", 12, 0, False, 12),
        ("serving", 13, 0, True, 13),
    ],
)
def test_what_goes_round(install: Install, state: Cache, whole: int, kept: int, cold: bool, moved: int) -> None:
    install(FakeCuda())
    sizes = SetSize(whole * MIB, whole * MIB), SetSize(kept * MIB, kept * MIB)
    clones = [lambda all_of_it=all_of_it: Inputs([all_of_it], {}, {}) for all_of_it in (True, False)]
    made = Rotation.of(state, *sizes, *clones, "cuda:0")
    assert (made.cache, made.cold, made.size.total) == (state, cold, moved * MIB)
    assert made.clone().args == [moved == whole]
    assert made.rotating == (moved * MIB if cold else 0)


@pytest.mark.parametrize(
    ("state", "size", "sets", "free", "places"),
    [
        ("serving", 64, 64, 100 << 30, 64),
        ("serving", MIB, 64, 100 << 30, 12),  # as many as a quarter of the L2 holds
        ("serving", 33 * MIB, 10, 100 << 30, 10),  # more than it holds: they go round
        ("serving", 33 * MIB, 10, 1 << 30, 7),
        ("warm", 33 * MIB, 10, 100 << 30, 1),
        ("cold", 64, 10, 100 << 30, 10),
        ("serving", 64, 512, 100 << 30, 64),
        ("cold", 0, 10, 100 << 30, 10),
        ("serving", 64, 1, 100 << 30, 1),
    ],
)
def test_results_lie_at_as_many_places_as_the_state_allows(
    install: Install, state: Cache, size: int, sets: int, free: int, places: int
) -> None:
    install(FakeCuda())
    made = Rotation(state, SetSize(64, 64), state == "cold", lambda: Inputs([], {}, {}))
    assert made.results_kept(size, sets, free, "cuda:0") == places


def test_what_small_calls_return_lies_at_as_many_places_as_their_inputs(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(FakeCuda(elapsed_ms=0.1))
    made, alive = returning_tensors(fake, monkeypatch)
    timing = run(fake, 64, "warm")
    assert (timing.input_sets, max(alive)) == (64, 63)  # and the one that is being made
    assert all(one() is None for one in made)


@pytest.mark.parametrize("places", [1, 4])
def test_a_result_is_let_go_before_the_next_at_its_place_is_made(places: int) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def call(given: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        result = given + 1
        made.append(weakref.ref(result))
        return result

    run = RoundRobin(call, [Inputs([torch.zeros(4)], {}, {})], places)
    for _ in range(12):
        run()
    assert alive == [min(number, places - 1) for number in range(12)]
    run.drop_results()
    assert all(one() is None for one in made)


def test_what_a_call_returns_of_its_own_is_counted_once() -> None:
    given = torch.zeros(4, dtype=torch.uint8)
    own = torch.zeros(16)
    results = iter([given, [own, own[2:], given, None, 3, own.to_sparse()]])
    run = RoundRobin(lambda x: next(results), [Inputs([given], {}, {("cpu", 0): given})])
    assert run.result_bytes() == 0
    run()
    assert run.result_bytes() == 0
    run()
    assert run.result_bytes() == 64


def test_inputs_that_results_would_drive_out_lie_at_one_place(install: Install) -> None:
    install(FakeCuda())
    made = Rotation("serving", SetSize(MIB, MIB), False, lambda: Inputs([], {}, {}))
    assert [made.set_count(2.0, size * MIB, 100 << 30, "cuda:0") for size in (0, 1, 5, 64)] == [12, 6, 2, 1]


def test_a_call_that_waits_for_the_gpu_has_one_set_of_what_stays(install: Install) -> None:
    timing = run(install(FakeCuda(waits=True, elapsed_ms=0.1)), 64, "warm")
    assert (timing.method, timing.input_sets) == ("events", 1)


def test_a_set_used_twice_a_replay_is_not_called_cold(install: Install) -> None:
    install(FakeCuda())
    small = Rotation("serving", SetSize(MIB, MIB), True, lambda: Inputs([], {}, {}))
    assert [small.cache_state(sets, 20, "cuda:0") for sets in (1, 19, 20)] == ["warm", "warm", "serving"]


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
    answer = Runner(Rebuilder("cuda:0", "cuda", None)).run(call, None, 0.001)
    assert answer["status"] == "ok", answer
    assert (answer["method"], answer["device"], answer["clocks"]) == ("host", "cpu", None)
    assert answer["threads"] and answer["device_name"]
    assert answer["median_us"] > 0.05


@pytest.fixture
def no_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with room, that must not be given anything to do."""
    room = memory.free_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100 << 30 if device == "cuda:0" else room(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    monkeypatch.setattr(rotation, "l2_bytes", lambda device: 50 * MIB)
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
    bound = bind_call(copy, None, resolve_operator("aten::copy_").schema, lambda _: None)
    monkeypatch.setattr(torch, "empty", empty)
    first = build_inputs(bound, Target(device, "cuda"))
    clone_inputs(bound, Target(device, "cuda"), first)
    on_gpu = (device, False)
    assert made == [on_gpu, ("cpu", pinned), on_gpu, ("cpu", pinned)]


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_memory_that_a_gpu_reaches_on_the_host_lies_there_again(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Beside memory of the GPU's own, which alone is copied for another set; of a storage each tensor is a view."""
    empty, made = torch.empty, []

    def allocated(size: int, dtype: torch.dtype, device: str = "cpu", pin_memory: bool = False) -> torch.Tensor:
        made.append((device, pin_memory))
        return empty(size, dtype=dtype)

    mapped = replace(tensor(16, device="cuda"), mapped=True)
    bound = BoundCall("aten::add", [Argument(name="self", value=mapped), Argument(value=replace(mapped, shape=(4,)))])
    bound.args.append(Argument(name="other", value=tensor(16, storage=1, device="cuda")))
    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: memory.held)
    inputs = build_inputs(bound, Target(device, "cuda"))
    own, on_gpu = (device, False), device != "cpu"
    assert made == [("cpu", True) if on_gpu else own, own]
    assert inputs.args[0].data_ptr() == inputs.args[1].data_ptr() != inputs.args[2].data_ptr()
    again = clone_inputs(bound, Target(device, "cuda"), inputs)
    assert made[2:] == ([own] if on_gpu else [own, own])
    assert (again.args[0].data_ptr() == inputs.args[0].data_ptr()) is on_gpu


@pytest.mark.parametrize(
    ("estimate", "sets", "count"),
    [
        (2.0, 1, 512),
        (2.0, 100, 500),  # about as many
        (2.0, 700, 700),
        (0.0, 7, 2051),
        (0.0, 1, 2048),
        (60.0, 1, 24),
        (250.0, 1, 24),  # six milliseconds
        (251.0, 1, 16),
        (2999.0, 1, 2),
        (3001.0, 1, 1),
        (5000.0, 1, 1),
    ],
)
def test_a_graph_lasts_a_millisecond_or_has_24_invocations_in_six(estimate: float, sets: int, count: int) -> None:
    assert rotation.graph_length(estimate, sets) == count


@given(st.integers(1, 4000))
def test_a_graphs_length_is_one_of_few(number: int) -> None:
    few = [2**power * part // 2 for power in range(1, 14) for part in (2, 3)] + [1]
    assert rotation.rounded_up(number) == min(one for one in few if one >= number)
    assert rotation.rounded_down(number) == max(one for one in few if one <= number)


@pytest.mark.parametrize(
    ("size", "sets", "cold", "count"),
    [
        (50 * MIB, 24, True, 96),
        (50 * MIB, 4, True, 4),  # there is memory for no more: a sweep and each once
        (MIB, 96, True, 96),
        (MIB, 64, True, 64),
        (50 * MIB, 1, True, 96),
        (MIB, 12, False, 96),
    ],
)
def test_what_a_sweep_alone_makes_cold_is_used_once(
    install: Install, size: int, sets: int, cold: bool, count: int
) -> None:
    install(FakeCuda())
    made = Rotation("serving", SetSize(size, size), cold, lambda: Inputs([], {}, {}))
    assert made.invocations(12.5, sets, "cuda:0") == count
    assert made.cache_state(sets, count, "cuda:0") == ("warm" if cold and sets == 1 else "serving")

"""A Program on a GPU, on a torch.cuda that only notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.replay.group import clock
from kcap.replay.group.peers import Alone
from kcap.replay.program import timing
from kcap.replay.program.durations import attribute_kernels
from kcap.replay.program.job import ProgramPart
from kcap.replay.program.prepared import Activations
from kcap.replay.program.runner import untimed_fields
from kcap.replay.program.timing import ProgramTiming, time_on_gpu
from kcap.replay.timing import graphs, rotation
from kcap.replay.timing.blocking import SleepBlocker
from kcap.replay.timing.graphs import KernelRun
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, FEWEST_SAMPLES, WAITS_FOR_GPU, Budget
from kcap.schemas.recording.values import Group

KERNELS = {0: {"mm": 1}, 1: {"split": 1, "reduce": 1}, 2: {"copy": 1}, 3: {"all_reduce": 1}}
COLLECTIVE = 3


class Fake:
    """Notes captures, replays and calls. A replay repeats what was captured; a call of a Part runs its kernels. `hand`:
    a call that goes through the Flow.
    """

    def __init__(self, captures: bool = True, elapsed_ms: float = 2.0) -> None:
        self.captures, self.elapsed_ms = captures, elapsed_ms
        self.log: list[str] = []
        self.ran: list[int] = []
        self.capturing: list[int] | None = None
        self.timed_out = False

    def part(self, number: int) -> SimpleNamespace:
        def run(how: str) -> None:
            self.log.append(f"{how} {number}")
            (self.ran if self.capturing is None else self.capturing).append(number)

        collective = SimpleNamespace(group=Group(2, 0) if number == COLLECTIVE else None)
        return SimpleNamespace(run=partial(run, "call"), handed=partial(run, "hand"), sets=[None], call=collective)

    def graph(self) -> SimpleNamespace:
        held: list[int] = []

        def begin(capture_error_mode: str) -> None:
            self.log.append("begin")
            self.capturing = held

        def end() -> None:
            self.log.append("end")
            self.capturing = None
            if not self.captures:
                raise RuntimeError("operation not permitted when stream is capturing")

        def replay() -> None:
            self.log.append("replay")
            self.ran += held

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)

    def events(self, work: Callable[[], None]) -> list[KernelRun]:
        self.ran.clear()
        work()
        return [KernelRun(name, n, 2.0 + number, 1) for n, number in enumerate(self.ran) for name in KERNELS[number]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], Fake]:
    def put(fake: Fake) -> Fake:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        event = SimpleNamespace(
            record=lambda s: None, synchronize=lambda: None, elapsed_time=lambda other: fake.elapsed_ms
        )
        names = {
            "CUDAGraph": fake.graph,
            "Event": lambda enable_timing: event,
            "synchronize": lambda *_: None,
            "stream": lambda s: nullcontext(),
            "current_stream": lambda device: stream,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        flow = SimpleNamespace(run=lambda part: part.handed())
        monkeypatch.setattr(timing, "Flow", lambda activations: flow)
        cool_down = SimpleNamespace(wait=lambda: fake.log.append("rest"))
        monkeypatch.setattr(timing, "CoolDown", lambda device: cool_down)
        monkeypatch.setattr(graphs, "timing_stream", lambda device: stream)
        monkeypatch.setattr(timing, "timing_stream", lambda device: stream)
        monkeypatch.setattr(clock, "timing_stream", lambda device: stream)
        blocker = SleepBlocker()
        blocker.block = lambda: fake.log.append("hold")  # type: ignore[method-assign]
        blocker.unblock = lambda: setattr(blocker, "timed_out", fake.timed_out)  # type: ignore[method-assign]
        monkeypatch.setattr(timing, "gpu_blocker", lambda device: blocker)
        monkeypatch.setattr(rotation, "reset_l2_persistence", lambda: True)
        monkeypatch.setattr(graphs, "kernel_runs", fake.events)
        return fake

    return put


def timed(
    fake: Fake,
    order: list[int],
    waits: tuple[int, ...] = (),
    direct: tuple[int, ...] = (),
    peers: Alone | None = None,
) -> ProgramTiming:
    known = {
        n: {"method": "events" if n in direct + waits else "graph", "waits": n in waits, "kernels": KERNELS[n]}
        for n in set(order)
    }
    parts: Any = SimpleNamespace(good={n: fake.part(n) for n in sorted(set(order))}, activations=Activations())
    return time_on_gpu(order, parts, lambda: fake.log.append("restore"), known, Budget(0, 0), peers or Alone("cuda:0"))


def test_the_whole_program_is_one_graph_in_its_order(install: Callable[[Fake], Fake]) -> None:
    fake = install(Fake())
    found = timed(fake, [0, 1, 0, 2])
    assert fake.log[fake.log.index("begin") + 1 : fake.log.index("end")] == ["hand 0", "hand 1", "hand 0", "hand 2"]
    assert (found.method, found.stretches, found.n, found.notes, found.poisoned) == ("graph", 1, 1, [], False)
    assert found.sampled.samples == [2000.0] * FEWEST_SAMPLES


class Later(Alone):
    """Rank 0 of two: the other's events and kernels last 0.5 ms and 1 µs less, since it comes later."""

    size = 2

    def barrier(self) -> None:
        self.barriers = getattr(self, "barriers", 0) + 1

    def gather(self, row: Sequence[float]) -> torch.Tensor:
        own = torch.tensor(row, dtype=torch.float64)
        clock = len(row) == 4
        later = torch.tensor([0.0, 0.0, 500_000.0, 500_000.0]) if clock else torch.ones(len(row))
        return torch.stack([own, own - later])


def test_ranks_time_a_program_from_the_last_arrival_and_its_collectives_without_the_wait(
    install: Callable[[Fake], Fake],
) -> None:
    peers = Later("cuda:0")
    timing = timed(install(Fake()), [0, COLLECTIVE, 0, COLLECTIVE], peers=peers)
    assert timing.sampled.samples == [1500.0] * FEWEST_SAMPLES and peers.barriers == FEWEST_SAMPLES + 1
    assert timing.durations.us == {0: 2.0, COLLECTIVE: 4.0}  # 5 in this rank
    assert timing.waited_us == 0.5  # in the second: in the first it waited for the other to start


def test_each_sample_is_rested_for_put_back_and_held_until_it_is_queued(install: Callable[[Fake], Fake]) -> None:
    fake = install(Fake())
    timed(fake, [0, 1])
    sample = ["rest", "restore", "hold", "replay"]
    first = fake.log.index("rest")
    assert fake.log[first : first + len(sample) * FEWEST_SAMPLES] == sample * FEWEST_SAMPLES
    assert fake.log.index("restore") < fake.log.index("begin")


def test_a_short_program_is_replayed_until_a_sample_lasts_a_millisecond(install: Callable[[Fake], Fake]) -> None:
    found = timed(install(Fake(elapsed_ms=0.1)), [0, 1])
    assert (found.n, found.sampled.samples) == (10, [10.0] * FEWEST_SAMPLES)


def test_what_cannot_be_captured_splits_it_into_as_few_graphs_as_can_be(install: Callable[[Fake], Fake]) -> None:
    fake = install(Fake())
    found = timed(fake, [0, 0, 2, 2, 0, 1], direct=(2,))
    assert (found.method, found.stretches, found.n) == ("events", 2, 1)
    assert found.notes == ["2 of 6 invocations are in no CUDA graph"]
    last = len(fake.log) - fake.log[::-1].index("hold")
    assert fake.log[last : last + 4] == ["replay", "call 2", "call 2", "replay"]


def test_a_call_that_waits_is_not_held_back_and_the_time_says_what_is_in_it(install: Callable[[Fake], Fake]) -> None:
    fake = install(Fake())
    found = timed(fake, [0, 2], waits=(2,))
    assert "hold" not in fake.log
    assert found.notes == ["1 of 2 invocations are in no CUDA graph", WAITS_FOR_GPU]


def test_a_program_of_more_launches_than_the_gpu_queues_is_told(install: Callable[[Fake], Fake]) -> None:
    fake = install(Fake())
    fake.timed_out = True
    assert BLOCKER_TIMED_OUT in timed(fake, [0, 2], direct=(2,)).notes


def test_a_failed_capture_runs_it_without_graphs_and_asks_for_a_new_process(install: Callable[[Fake], Fake]) -> None:
    found = timed(install(Fake(captures=False)), [0, 1])
    assert (found.method, found.stretches, found.poisoned) == ("events", 0, True)
    assert "when stream is capturing" in found.notes[0]


def test_every_kernel_of_a_run_is_given_to_its_call(install: Callable[[Fake], Fake]) -> None:
    shared = timed(install(Fake()), [0, 1, 0]).durations
    assert shared.us == {0: 2.0, 1: 6.0}
    assert (shared.total_us, shared.unmatched_us) == (10.0, 0.0)
    assert [(k.name, k.us, k.count) for k in shared.kernels[1]] == [("split", 3.0, 1), ("reduce", 3.0, 1)]


def test_kernels_that_are_no_calls_are_told_and_counted_in_the_whole(
    install: Callable[[Fake], Fake], monkeypatch
) -> None:
    fake = install(Fake())
    monkeypatch.setattr(graphs, "kernel_runs", lambda work: [*fake.events(work), KernelRun("memset", 99, 2.5, 1)])
    found = timed(fake, [0, 1])
    assert (found.durations.total_us, found.durations.unmatched_us) == (10.5, 2.5)
    assert found.notes == ["23.8% of the kernels' time could be given to no call"]


@pytest.mark.parametrize("failure", [RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"), None])
def test_without_a_profiler_the_time_stands_and_the_durations_are_missing(
    install: Callable[[Fake], Fake], monkeypatch, failure: Exception | None
) -> None:
    def fail(work: Callable[[], None]) -> list[KernelRun]:
        if failure:
            raise failure
        return []

    fake = install(Fake())
    monkeypatch.setattr(graphs, "kernel_runs", fail)
    found = timed(fake, [0, 1])
    assert found.sampled.samples == [2000.0] * FEWEST_SAMPLES
    assert (found.durations.us, found.durations.total_us) == ({}, None)
    assert found.notes[0].startswith("no kernel durations: ")


def test_a_calls_time_is_the_mean_over_its_invocations_and_runs() -> None:
    runs = [
        [KernelRun("mm", 0, 4.0, 1), KernelRun("mm", 1, 6.0, 1)],
        [KernelRun("mm", 0, 5.0, 1), KernelRun("mm", 1, 9.0, 1)],
    ]
    shared = attribute_kernels(runs, [0, 0], {0: {"mm": 1}})
    assert (shared.us, shared.total_us) == ({0: 6.0}, 12.0)
    assert [(k.name, k.us, k.count) for k in shared.kernels[0]] == [("mm", 5.5, 1.0)]


def test_a_call_that_launches_nothing_takes_no_time_and_is_replayed() -> None:
    part = ProgramPart(sample=None, method="none", kernels={}, waits=False)
    assert untimed_fields(3, part) == {"call": 3, "status": "ok", "us": 0.0}
    assert untimed_fields(4, {**part, "method": "host"})["status"] == "host"

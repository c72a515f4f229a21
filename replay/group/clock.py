"""Time a collective as a group: from the arrival of the last rank to the end of the last one.

Before each sample all ranks meet at a barrier, which they leave some microseconds apart. What an early rank then waits
for the others is the engine's skew, not the collective's time, so it is told apart:

- On CPUs all ranks read one clock (CLOCK_MONOTONIC of the machine). The time of a sample is from the latest start to
  the latest end; a rank waited from its own start to the latest.
- GPUs have a clock each. A rank's events enclose its wait and the transfer; the rank that came last waited for nobody,
  so the shortest of all ranks' times is the transfer, and the rest of a rank's time is its wait.

Every rank sees the same table of all ranks' times, and so ends sampling after the same sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from kcap.replay.group.peers import Alone, Peers
from kcap.replay.timing.blocking import SleepBlocker, gpu_blocker
from kcap.replay.timing.clock import preemptions, repeat_run
from kcap.replay.timing.device import ClockWatch, CoolDown
from kcap.replay.timing.graphs import (
    CaptureFailed,
    Run,
    capture_graph,
    do_nothing,
    kernel_durations,
    kernel_runs,
    timed_us,
    timing_stream,
)
from kcap.replay.timing.rotation import InputSnapshot
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, Budget, Sampled, Timing, sample_until
from kcap.schemas.derive.bound_call import Inputs, StorageKey
from kcap.schemas.results.measurement import DISTURBED, KernelDuration, Method

MIN_SAMPLE_US = 1000.0  # far above the few microseconds by which ranks leave a barrier apart
MAX_INVOCATIONS = 64
IN_PLACE_BITS = 64  # sums in place grow by a factor of the group's size each time: bfloat16 ends at 2 ** 128
WARM_UPS = 3  # NCCL connects and allocates in the first


@dataclass
class GroupSampler:
    """Takes the samples of one rank; what it tells is the same in all.

    `waited_us`: by sample what a rank waited for the last one, the mean over ranks. `now`: the latest end, in seconds.
    """

    peers: Alone
    prepare: Run
    waited_us: list[float] = field(default_factory=list)
    now: float = 0.0
    slow: bool = False

    def sample(self, work: Run, n: int) -> float:
        """Microseconds of one of the `n` invocations in `work`."""
        self.prepare()
        self.peers.barrier()
        started, ended, elapsed, slow = self.measured(work)
        table = self.peers.gather([started, ended, elapsed, slow])
        self.now, self.slow = float(table[:, 1].max()) / 1e9, bool(table[:, 3].any())
        transfer, waits = self.split(table)
        self.waited_us.append(float(waits.mean()) / 1e3)
        return transfer / 1e3 / n

    def sample_until(self, work: Run, n: int, budget: Budget, min_samples: int = 1) -> Sampled:
        """Samples of `work`, as many in every rank."""
        take_sample = partial(self.sample, work, n)
        return sample_until(take_sample, budget, lambda: self.now, lambda: self.slow, min_samples)

    def forget(self) -> None:
        """What was sampled so far does not count: libraries connect their ranks in the first invocations."""
        self.waited_us.clear()

    @property
    def notes(self) -> list[str]:
        """What is to be said of the times."""
        return []

    def kernels(self, work: Run, n: int) -> list[KernelDuration]:
        """The kernels of one of the `n` invocations in `work`, where a profiler sees any."""
        return []

    def measured(self, work: Run) -> tuple[int, int, float, bool]:
        """Nanoseconds at start and end by the host's clock, and between them; whether the GPU's clock was slow."""
        start = time.monotonic_ns()
        work()
        end = time.monotonic_ns()
        return start, end, float(end - start), False

    def split(self, table: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Nanoseconds from the last start to the last end, and what each rank waited before: [size]."""
        starts = table[:, 0]
        return float(table[:, 1].max() - starts.max()), starts.max() - starts


@dataclass
class GpuGroupSampler(GroupSampler):
    """The same by each GPU's own events. `blocker` blocks the GPU until the host has queued the work."""

    blocker: SleepBlocker | None = None

    def __post_init__(self) -> None:
        self._stream, self._watch = timing_stream(self.peers.device), ClockWatch(self.peers.device)

    def measured(self, work: Run) -> tuple[int, int, float, bool]:
        start = time.monotonic_ns()
        elapsed = timed_us(work, 1, do_nothing, self._stream, self.blocker) * 1e3
        return start, time.monotonic_ns(), elapsed, self._watch.slow()

    def split(self, table: torch.Tensor) -> tuple[float, torch.Tensor]:
        elapsed = table[:, 2]
        return float(elapsed.min()), elapsed - elapsed.min()

    def forget(self) -> None:
        super().forget()
        if self.blocker:
            self.blocker.reset()

    def kernels(self, work: Run, n: int) -> list[KernelDuration]:
        """Of each the shortest duration in any rank, in which it waits for nobody."""
        self.prepare()
        self.peers.barrier()
        try:
            own = kernel_durations(kernel_runs(work), n)
        except (RuntimeError, AttributeError, AssertionError):  # of the profiler
            own = []
        sizes = self.peers.gather([len(own)])
        if not own or bool((sizes != len(own)).any()):  # the same in every rank
            return own
        shortest = self.peers.gather([kernel.us for kernel in own]).amin(dim=0)
        return [kernel.model_copy(update={"us": us}) for kernel, us in zip(own, shortest.tolist(), strict=True)]

    @property
    def notes(self) -> list[str]:
        return [BLOCKER_TIMED_OUT] if self.blocker and self.blocker.timed_out else []


def time_collective(
    call: Callable[..., Any], inputs: Inputs, restored: list[StorageKey], seconds: float, peers: Peers
) -> tuple[Timing, float]:
    """Time `call` on `inputs` in all ranks at once; besides, the median of what they waited for the last one, in µs.

    `restored`: the storages to restore before each sample.
    """
    snapshot, device = InputSnapshot.of(inputs, restored), peers.device
    most = IN_PLACE_BITS // max((peers.size - 1).bit_length(), 1) if restored else MAX_INVOCATIONS

    run, restore = partial(call, *inputs.args, **inputs.kwargs), partial(snapshot.restore, [inputs])
    if not device.startswith("cuda"):
        return _time(GroupSampler(peers, restore), run, most, Budget.on("cpu", seconds))
    cool_down = CoolDown(device)

    def prepare() -> None:
        cool_down.wait()
        restore()

    torch.cuda.synchronize(device)
    with torch.cuda.stream(timing_stream(device)):
        sampler = GpuGroupSampler(peers, prepare, blocker=gpu_blocker(device))
        return _time(sampler, run, most, Budget.on(device, seconds))


def _time(sampler: GroupSampler, run: Run, most: int, budget: Budget) -> tuple[Timing, float]:
    for _ in range(WARM_UPS):
        estimate = sampler.sample(run, 1)
    n = max(1, min(round(MIN_SAMPLE_US / max(estimate, 1.0)), most))
    work, method, failure = _batch(sampler, run, n)
    sampler.sample(work, n)
    sampler.forget()
    before = preemptions()
    series = sampler.sample_until(work, n, budget)
    preempted = sampler.peers.any(preemptions() - before > len(series.samples) / 4)
    notes = [*failure, *sampler.notes, *([DISTURBED] if preempted and method == "host" else [])]
    waited_us, kernels = median(sampler.waited_us), sampler.kernels(work, n)
    poisoned, slow = bool(failure), series.slow
    return Timing(series.samples, n, series.rule, method, "warm", 1, notes, poisoned, None, slow, kernels), waited_us


def _batch(sampler: GroupSampler, run: Run, n: int) -> tuple[Run, Method, list[str]]:
    """`n` invocations, on GPUs in one graph, and why there is none: every rank captures it, or none can."""
    if not isinstance(sampler, GpuGroupSampler):
        return repeat_run(run, n), "host", []
    try:
        return capture_graph(run, n, sampler.peers.end_capture), "graph", []
    except CaptureFailed as failure:
        return repeat_run(run, n), "events", [str(failure)]

"""GPU work that is ready to be timed: captured in a CUDA graph, between two events, or profiled kernel by kernel.

Everything runs on the current stream. Kernel durations are CUPTI's, through torch's profiler, in a pass of its own over
work that was timed already. A duration is from a kernel's own start to its end; back-to-back time has the gaps between
kernels, too. Compare each with its like.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler import profile

from kcap.replay.timing.blocking import SleepHold
from kcap.replay.timing.sampling import HOLD_GAVE_UP, WAITS_FOR_GPU
from kcap.schemas.results.measurement import KernelDuration, Method

Run = Callable[[], Any]


REASON_LENGTH = 120  # characters


class CaptureFailed(Exception):
    """The work cannot be captured; torch is left in a state that no later capture survives."""


@cache
def timing_stream(device: str) -> torch.cuda.Stream:
    """One stream for all: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def do_nothing() -> None:
    """Nothing to do before a sample."""


def why_it_waits(run: Run) -> str | None:
    """Why the work cannot be captured: it waits for the GPU. A failed capture would spoil the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0][:REASON_LENGTH]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture_graph(run: Run, n: int) -> Run:
    """A graph of `n` runs; what replays it. Replayed once, so that it lies on the GPU."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # a collection that frees another graph's memory would end the capture
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(n):
                run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        raise CaptureFailed(str(error).splitlines()[0][:REASON_LENGTH]) from None
    finally:
        gc.enable()
    graph.replay()
    return lambda: graph.replay()


def timed_us(run: Run, n: int, before: Run, stream: torch.cuda.Stream, hold: SleepHold | None) -> float:
    """Microseconds of one of the `n` invocations in `run`; `hold` keeps the GPU back while the host queues them.

    `before` is queued ahead of them and not timed.
    """
    before()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if hold:
        hold.hold()
    try:
        start.record(stream)
        run()
        end.record(stream)
    finally:
        if hold:
            hold.release()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / n


PROFILED_REPLAYS = 3  # replays in the pass for kernel durations


@dataclass(frozen=True)
class GpuWork:
    """What is timed: `run` does `n` invocations after `before`, behind `hold`; `reason`: why it is no graph.

    `hold` None: it waits for the GPU itself, and cannot be held back. `rest` comes before each sample.
    """

    run: Run
    n: int
    before: Run
    stream: torch.cuda.Stream
    hold: SleepHold | None = None
    reason: str | None = None
    spoiled: bool = False
    rest: Run = do_nothing

    @property
    def method(self) -> Method:
        return "events" if self.reason else "graph"

    def sample(self) -> float:
        """Microseconds of one invocation."""
        self.rest()
        return timed_us(self.run, self.n, self.before, self.stream, self.hold)

    def durations(self) -> list[KernelDuration]:
        """The kernels of one invocation."""
        if self.reason:
            self.rest()
            self.before()
            return kernel_durations(kernel_runs(self.run), self.n)
        replays = graph_replays(self._profiled) or replays_after(self.before, self._profiled, PROFILED_REPLAYS)
        return kernel_durations([ran for replay in replays for ran in replay], self.n * len(replays))

    def _profiled(self) -> None:
        for _ in range(PROFILED_REPLAYS):
            torch.cuda.synchronize()
            self.rest()
            self.before()
            self.run()


def work_notes(work: GpuWork) -> list[str]:
    """Why it is no graph, if it is none, and whether the host's time is in what was measured."""
    host = WAITS_FOR_GPU if work.hold is None else HOLD_GAVE_UP if work.hold.gave_up else None
    return [*([f"no CUDA graph: {work.reason}"] if work.reason else []), *([host] if host else [])]


def profile_kernels(work: GpuWork) -> tuple[list[KernelDuration], list[str]]:
    """The kernels of one invocation, or a note that says why there are none."""
    try:
        ran = work.durations()
    except (RuntimeError, AttributeError, AssertionError) as error:
        return [], [f"no kernel durations: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}"]
    return ran, [] if ran else ["no kernel durations: the profiler saw no kernel (is another one running?)"]


GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")


ANNOTATIONS = frozenset({"gpu_user_annotation", "user_annotation", "overhead"})


@dataclass(frozen=True)
class KernelRun:
    """A kernel, copy or memset on the GPU. `launch`: what its launch and it have in common."""

    name: str
    start_ns: int
    us: float
    launch: int


def graph_replays(work: Callable[[], None]) -> list[list[KernelRun]]:
    """What each graph launch in `work` ran, in order; what was launched by itself is left out."""
    found = profiler_events(work)
    launches = {e.correlation_id(): e.start_ns() for e in found if e.name().startswith(GRAPH_LAUNCHES)}
    replays: dict[int, list[KernelRun]] = {one: [] for one in sorted(launches, key=lambda one: launches[one])}
    for ran in runs_on_gpu(found):
        if ran.launch in replays:
            replays[ran.launch].append(ran)
    return [replay for replay in replays.values() if replay]


def replays_after(before: Callable[[], None], work: Callable[[], None], times: int) -> list[list[KernelRun]]:
    """As graph_replays, where the profiler tells of no graph launch: `work` did, `times` times, `before` and a replay.

    Empty where the times differ.
    """
    lead, found = len(kernel_runs(before)), kernel_runs(work)
    each, rest = divmod(len(found), times)
    if rest or each <= lead:
        return []
    return [found[start + lead : start + each] for start in range(0, len(found), each)]


def kernel_runs(work: Callable[[], None]) -> list[KernelRun]:
    """All that `work` ran on the GPU, in the order of its start."""
    return runs_on_gpu(profiler_events(work))


def profiler_events(work: Callable[[], None]) -> list[Any]:
    """The profiler's events of `work`, all of whose GPU work has ended."""
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_cpu=False, use_kineto=True) as profiler:
        work()
        torch.cuda.synchronize()
    return list(profiler.kineto_results.events())


def runs_on_gpu(found: Sequence[Any]) -> list[KernelRun]:
    cuda = torch._C._autograd.DeviceType.CUDA
    ran = [
        KernelRun(e.name(), e.start_ns(), e.duration_ns() / 1e3, e.correlation_id())
        for e in found
        if e.device_type() == cuda and not is_annotation(e)
    ]
    return sorted(ran, key=lambda one: one.start_ns)


def is_annotation(event: Any) -> bool:
    """Whether an event on the GPU's line is a range that a program named, and no work."""
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    return bool(kind in ANNOTATIONS or event.is_user_annotation())


def kernel_durations(ran: Sequence[KernelRun], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations` that ran one after another, in their order.

    Where every invocation ran the same ones, the median is of each place in it; else it is of each name.
    """
    each, rest = divmod(len(ran), max(invocations, 1))
    names = [one.name for one in ran]
    if each and not rest and names == names[:each] * invocations:
        places = [KernelDuration(name=names[i], us=median(one.us for one in ran[i::each])) for i in range(each)]
        return joined_by_name(places)
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in ran:
        by_name[one.name].append(one.us)
    return [KernelDuration(name=n, us=median(us), count=len(us) / invocations) for n, us in by_name.items()]


def joined_by_name(kernels: Sequence[KernelDuration]) -> list[KernelDuration]:
    """One entry a name, with the mean over its places."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.us)
    return [KernelDuration(name=n, us=sum(us) / len(us), count=len(us)) for n, us in by_name.items()]


def kernels_us(kernels: Sequence[KernelDuration]) -> float:
    """Microseconds of one invocation's kernels."""
    return sum(kernel.us * kernel.count for kernel in kernels)

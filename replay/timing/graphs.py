"""GPU work that is ready to be timed: captured in a CUDA graph, between two events, or profiled kernel by kernel.

Everything runs on the current stream. The durations of kernels are CUPTI's, through torch's profiler, in a separate
pass over work that was timed before. A duration is from a kernel's start to its end; back-to-back time includes the
gaps between kernels. Compare each only with its kind.
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

from kcap.errors import first_line
from kcap.replay.timing.blocking import SleepBlocker
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, WAITS_FOR_GPU
from kcap.schemas.results.measurement import KernelDuration, Method

Run = Callable[[], Any]
REASON_LENGTH = 120  # characters
PROFILED_REPLAYS = 3  # replays in the pass for kernel durations


class CaptureFailed(Exception):
    """The work cannot be captured, and in this process no later capture will work either."""


@cache
def timing_stream(device: str) -> torch.cuda.Stream:
    """One stream for all timing: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def do_nothing() -> None:
    """Where nothing has to be prepared."""


def detect_sync(run: Run) -> str | None:
    """torch's message if the work waits for the GPU. Such work cannot be captured: trying would poison the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return first_line(error, REASON_LENGTH)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture_graph(run: Run, n: int, captured: Run = do_nothing) -> Run:
    """A function that replays a graph of `n` runs. It was replayed once, which uploads it to the GPU.

    `captured`: what must happen before that.
    """
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
        raise CaptureFailed(first_line(error, REASON_LENGTH)) from None
    finally:
        gc.enable()
    captured()
    graph.replay()
    return lambda: graph.replay()


def timed_us(run: Run, n: int, prepare: Run, stream: torch.cuda.Stream, blocker: SleepBlocker | None) -> float:
    """Microseconds of one of the `n` invocations in `run`; `blocker` blocks the GPU while the host queues them.

    `prepare` is queued before them and not timed.
    """
    prepare()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if blocker:
        blocker.block()
    try:
        start.record(stream)
        run()
        end.record(stream)
    finally:
        if blocker:
            blocker.unblock()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / n


@dataclass(frozen=True)
class GpuWork:
    """Work to time: `run` does `n` invocations after `prepare`, behind `blocker`. `reason`: why it is no graph.

    `blocker` None: it waits for the GPU itself and cannot be blocked. `cool_down` comes before each sample.
    """

    run: Run
    n: int
    prepare: Run
    stream: torch.cuda.Stream
    blocker: SleepBlocker | None = None
    reason: str | None = None
    poisoned: bool = False
    cool_down: Run = do_nothing

    @property
    def method(self) -> Method:
        return "events" if self.reason else "graph"

    def sample(self) -> float:
        """Microseconds of one invocation."""
        self.cool_down()
        return timed_us(self.run, self.n, self.prepare, self.stream, self.blocker)

    def durations(self) -> list[KernelDuration]:
        """The kernels of one invocation."""
        if self.reason:
            self.cool_down()
            self.prepare()
            return kernel_durations(kernel_runs(self.run), self.n)
        replays = graph_replays(self._profiled) or replays_after(self.prepare, self._profiled, PROFILED_REPLAYS)
        return kernel_durations([kernel for replay in replays for kernel in replay], self.n * len(replays))

    def _profiled(self) -> None:
        for _ in range(PROFILED_REPLAYS):
            torch.cuda.synchronize()
            self.cool_down()
            self.prepare()
            self.run()


def work_notes(work: GpuWork) -> list[str]:
    """Why it is no graph, if it is none, and whether the measured time includes the host's."""
    host = WAITS_FOR_GPU if work.blocker is None else BLOCKER_TIMED_OUT if work.blocker.timed_out else None
    return [*([f"no CUDA graph: {work.reason}"] if work.reason else []), *([host] if host else [])]


def profile_kernels(work: GpuWork) -> tuple[list[KernelDuration], list[str]]:
    """The kernels of one invocation, or a note on why there are none."""
    try:
        kernels = work.durations()
    except (RuntimeError, AttributeError, AssertionError) as error:
        return [], [f"no kernel durations: {first_line(error, REASON_LENGTH)}"]
    return kernels, [] if kernels else ["no kernel durations: the profiler saw no kernel (is another one running?)"]


GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
ANNOTATIONS = frozenset({"gpu_user_annotation", "user_annotation", "overhead"})


@dataclass(frozen=True)
class KernelRun:
    """A kernel, copy or memset on the GPU. `launch`: the correlation id that it shares with its launch."""

    name: str
    start_ns: int
    us: float
    launch: int


def graph_replays(work: Callable[[], None]) -> list[list[KernelRun]]:
    """The kernels of each graph launch in `work`, in order; those that were launched directly are left out."""
    events = profiler_events(work)
    launches = {e.correlation_id(): e.start_ns() for e in events if e.name().startswith(GRAPH_LAUNCHES)}
    replays: dict[int, list[KernelRun]] = {
        launch: [] for launch in sorted(launches, key=lambda launch: launches[launch])
    }
    for kernel in runs_on_gpu(events):
        if kernel.launch in replays:
            replays[kernel.launch].append(kernel)
    return [replay for replay in replays.values() if replay]


def replays_after(before: Callable[[], None], work: Callable[[], None], times: int) -> list[list[KernelRun]]:
    """As graph_replays, where the profiler reports no graph launches: `work` runs `before` and a replay `times` times.

    Empty where these differ in their number of kernels.
    """
    ahead, kernels = len(kernel_runs(before)), kernel_runs(work)
    per_replay, rest = divmod(len(kernels), times)
    if rest or per_replay <= ahead:
        return []
    return [kernels[start + ahead : start + per_replay] for start in range(0, len(kernels), per_replay)]


def kernel_runs(work: Callable[[], None]) -> list[KernelRun]:
    """All that `work` ran on the GPU, by start time."""
    return runs_on_gpu(profiler_events(work))


def profiler_events(work: Callable[[], None]) -> list[Any]:
    """The profiler's events of `work`, after all its GPU work has ended."""
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_cpu=False, use_kineto=True) as profiler:
        work()
        torch.cuda.synchronize()
    return list(profiler.kineto_results.events())


def runs_on_gpu(events: Sequence[Any]) -> list[KernelRun]:
    cuda = torch._C._autograd.DeviceType.CUDA
    kernels = [
        KernelRun(e.name(), e.start_ns(), e.duration_ns() / 1e3, e.correlation_id())
        for e in events
        if e.device_type() == cuda and not is_annotation(e)
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_ns)


def is_annotation(event: Any) -> bool:
    """Whether an event on the GPU's timeline is a range that a program named, not work."""
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    return bool(kind in ANNOTATIONS or event.is_user_annotation())


def kernel_durations(kernels: Sequence[KernelRun], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations` that ran one after another, in their order.

    Where every invocation ran the same kernels, the median is for each position in it; else for each name.
    """
    per_invocation, rest = divmod(len(kernels), max(invocations, 1))
    names = [kernel.name for kernel in kernels]
    if per_invocation and not rest and names == names[:per_invocation] * invocations:
        positions = [
            KernelDuration(name=names[i], us=median(kernel.us for kernel in kernels[i::per_invocation]))
            for i in range(per_invocation)
        ]
        return joined_by_name(positions)
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.us)
    return [KernelDuration(name=n, us=median(us), count=len(us) / invocations) for n, us in by_name.items()]


def joined_by_name(kernels: Sequence[KernelDuration]) -> list[KernelDuration]:
    """One entry for each name, with the mean over its positions."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.us)
    return [KernelDuration(name=n, us=sum(us) / len(us), count=len(us)) for n, us in by_name.items()]


def kernels_us(kernels: Sequence[KernelDuration]) -> float:
    """Microseconds of one invocation's kernels."""
    return sum(kernel.us * kernel.count for kernel in kernels)

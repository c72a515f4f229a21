"""Kernel durations by CUPTI, through torch's profiler: a pass of its own over work that was timed already.

A duration is from a kernel's own start to its end; back-to-back time has the gaps between kernels, too. Compare each
with its like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler import profile

from kcap.schemas.measurement import KernelDuration

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
ANNOTATIONS = frozenset({"gpu_user_annotation", "user_annotation", "overhead"})


@dataclass(frozen=True)
class Ran:
    """A kernel, copy or memset on the GPU. `launch`: what its launch and it have in common."""

    name: str
    start_ns: int
    us: float
    launch: int


def graph_replays(work: Callable[[], None]) -> list[list[Ran]]:
    """What each graph launch in `work` ran, in order; what was launched by itself is left out."""
    found = events(work)
    launches = {e.correlation_id(): e.start_ns() for e in found if e.name().startswith(GRAPH_LAUNCHES)}
    replays: dict[int, list[Ran]] = {one: [] for one in sorted(launches, key=lambda one: launches[one])}
    for ran in on_gpu(found):
        if ran.launch in replays:
            replays[ran.launch].append(ran)
    return [replay for replay in replays.values() if replay]


def after(before: Callable[[], None], work: Callable[[], None], times: int) -> list[list[Ran]]:
    """As graph_replays, where the profiler tells of no graph launch: `work` did, `times` times, `before` and a replay.

    Empty where the times differ.
    """
    lead, found = len(plain(before)), plain(work)
    each, rest = divmod(len(found), times)
    if rest or each <= lead:
        return []
    return [found[start + lead : start + each] for start in range(0, len(found), each)]


def plain(work: Callable[[], None]) -> list[Ran]:
    """All that `work` ran on the GPU, in the order of its start."""
    return on_gpu(events(work))


def events(work: Callable[[], None]) -> list[Any]:
    """The profiler's events of `work`, all of whose GPU work has ended."""
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_cpu=False, use_kineto=True) as profiler:
        work()
        torch.cuda.synchronize()
    return list(profiler.kineto_results.events())


def on_gpu(found: Sequence[Any]) -> list[Ran]:
    cuda = torch._C._autograd.DeviceType.CUDA
    ran = [
        Ran(e.name(), e.start_ns(), e.duration_ns() / 1e3, e.correlation_id())
        for e in found
        if e.device_type() == cuda and not annotation(e)
    ]
    return sorted(ran, key=lambda one: one.start_ns)


def annotation(event: Any) -> bool:
    """Whether an event on the GPU's line is a range that a program named, and no work."""
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    return bool(kind in ANNOTATIONS or event.is_user_annotation())


def durations(ran: Sequence[Ran], invocations: int) -> list[KernelDuration]:
    """The kernels of one of `invocations` that ran one after another, in their order.

    Where every invocation ran the same ones, the median is of each place in it; else it is of each name.
    """
    each, rest = divmod(len(ran), max(invocations, 1))
    names = [one.name for one in ran]
    if each and not rest and names == names[:each] * invocations:
        places = [KernelDuration(name=names[i], us=median(one.us for one in ran[i::each])) for i in range(each)]
        return joined(places)
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in ran:
        by_name[one.name].append(one.us)
    return [KernelDuration(name=n, us=median(us), count=len(us) / invocations) for n, us in by_name.items()]


def joined(kernels: Sequence[KernelDuration]) -> list[KernelDuration]:
    """One entry a name, with the mean over its places."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.us)
    return [KernelDuration(name=n, us=sum(us) / len(us), count=len(us)) for n, us in by_name.items()]


def total(kernels: Sequence[KernelDuration]) -> float:
    """Microseconds of one invocation's kernels."""
    return sum(kernel.us * kernel.count for kernel in kernels)

"""Replay one Call on one Sample, inside the worker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kcap.replay import environment, memory, rules
from kcap.replay.bind import Bound
from kcap.replay.inputs import Inputs
from kcap.replay.job import SEED
from kcap.replay.layout import Target
from kcap.replay.operators import Operator
from kcap.replay.rebuild import Decided, Rebuilder
from kcap.replay.roles import kept
from kcap.replay.roofline.calls import cost_of
from kcap.replay.roofline.judging import work
from kcap.replay.skip import Skip
from kcap.replay.timing import clocks, kernels
from kcap.replay.timing.clock import time_on
from kcap.replay.timing.result import Timing
from kcap.replay.timing.rotation import Rotation, Size
from kcap.schemas.families.cost import Cost
from kcap.schemas.measurement import DROPPED, SLOWED, Cache, Clocks, quartiles
from kcap.schemas.recording import Call, Sample


@dataclass(frozen=True)
class How:
    """How to time: in which cache state, and whether to ask the profiler for the kernels' durations, too."""

    cache: Cache = "serving"
    kernels: bool = False

    @classmethod
    def of(cls, session: dict[str, Any]) -> How:
        """What a worker's session says."""
        return cls(session.get("cache") or cls.cache, bool(session.get("kernels")))


class Runner:
    """Replays Calls with what `rebuilder` makes of them."""

    def __init__(self, rebuilder: Rebuilder, how: How = How()) -> None:
        self.rebuilder, self.how = rebuilder, how
        self.target = rebuilder.target

    def run(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        """The fields of a Measurement that this replay decides."""
        try:
            return self._time(call, sample, seconds)
        except Exception as error:
            return verdict(error, self.target)

    def _time(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        torch.manual_seed(SEED)
        before = clocks.read(self.target.device)
        decided = self.rebuilder.decide(call, sample, cut=True)
        first = self.rebuilder.build(decided)
        cost = cost_of(call, decided)
        touched = touched_by(decided, cost)
        rotation = rotation_of(self.how.cache, self.rebuilder, decided, touched, first)
        timing = self._clock(decided, first, rotation, seconds)
        timing = replace(timing, notes=[*timing.notes, *decided.operator.notes])
        told = report(timing, decided.total, touched, self.target.device, before)
        return {**told, "work": work(cost, decided.total - rotation.rotating)}

    def _clock(self, decided: Decided, first: Inputs, rotation: Rotation, seconds: float) -> Timing:
        operator = decided.operator
        restored = written(operator, decided.bound, decided.rule, self.target)
        return time_on(self.target.device, operator.call, first, rotation, restored, seconds, self.how.kernels)


def touched_by(decided: Decided, cost: Cost | None) -> int:
    """The bytes of one set that an invocation reaches: what the Rule says, or else what it must move by its family (of
    a stack of experts those that have tokens)."""
    told = decided.touched
    return min(told, cost.bytes) if told == decided.total and cost and cost.bytes else told


def rotation_of(cache: Cache, rebuilder: Rebuilder, decided: Decided, reached: int, first: Inputs) -> Rotation:
    """What of a Call's storages goes round in the state `cache`, `reached` bytes of which an invocation touches."""
    moved = kept(decided.bound, rebuilder.target)
    whole, clone = Size(decided.total, reached), partial(rebuilder.clone, decided, first)
    return Rotation.of(
        cache, whole, size_of(moved, first, reached), clone, partial(clone, moved), rebuilder.target.device
    )


def size_of(moved: Collection[memory.Key], inputs: Inputs, reached: int) -> Size:
    """That of the storages `moved`; of all of `inputs` an invocation reaches so many bytes, the others' first."""
    size = sum(len(inputs.buffers[key]) for key in moved)
    return Size(size, min(size, max(reached - (inputs.total - size), 1)))


def written(operator: Operator, bound: Bound, rule: rules.Rule, target: Target) -> list[memory.Key]:
    """The storages that the operator writes to and that must be restored before it runs again."""
    writes = {a.name for a in operator.schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    keys: set[memory.Key] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        if (argument.written or argument.name in writes) and argument.name not in rule.harmless:
            keys.add((memory.place(spec.device, target.device, target.home), spec.storage))
    return sorted(keys)


def report(timing: Timing, set_bytes: int, touched: int, device: str, before: Clocks | None = None) -> dict[str, Any]:
    """What a Measurement says of `timing`; `before`: the GPU's state before it."""
    q1, median, q3 = quartiles(timing.counted_us)
    host = timing.method == "host"
    state = None if host else clocks.read(device)
    return {
        **(environment.host() if host else {}),
        "status": "ok",
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "samples_us": timing.samples_us,
        "slow_samples": timing.slow,
        "kernels": [kernel.model_dump() for kernel in timing.kernels],
        "kernel_us": kernels.total(timing.kernels) if timing.kernels else None,
        "n": timing.n,
        "stop": timing.stop,
        "method": timing.method,
        "cache": timing.cache,
        "input_sets": timing.input_sets,
        "bytes": set_bytes,
        "touched": touched,
        "floor_us": timing.floor_us,
        "notes": timing.notes + slowed(timing, state),
        "poisoned": timing.spoiled,
        "clocks_before": before.model_dump() if before and not host else None,
        "clocks": state.model_dump() if state else None,
    }


def slowed(timing: Timing, state: Clocks | None) -> list[str]:
    """Notes on samples that a slow clock spoiled: some, which are dropped, or all, and after them."""
    if timing.slow and len(timing.slow) < len(timing.samples_us):
        return [f"{len(timing.slow)} {DROPPED}"]
    return [SLOWED] if timing.slow or (state and clocks.is_slow(state.sm_mhz, state.sm_max_mhz)) else []


NO_KERNEL = ("not implemented for", "is not implemented", "Could not run", "not supported on CPU", "not compiled with")
NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")


POISON = ("CUDA error", "device-side assert", "outside graph capture")  # the process can run nothing more on the GPU


def verdict(error: Exception, target: Target) -> dict[str, Any]:
    """Skipped, where this device or torch cannot run the Call at all; failed, where it should have run."""
    text = str(error).strip()
    line = text.splitlines()[0][:200] if text else type(error).__name__
    if isinstance(error, Skip):
        return {"status": "skipped", "reason": line}
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return {"status": "skipped", "reason": f"its results do not fit into the memory of {target.device}"}
    if isinstance(error, NotImplementedError) or any(words in line for words in NO_KERNEL):
        return {"status": "skipped", "reason": f"torch has no kernel for it on {target.device} ({line[:120]})"}
    if isinstance(error, RuntimeError) and not target.device.startswith(target.home):
        return {"status": "skipped", "reason": f"recorded on {target.home}, refused on {target.device}: {line}"}
    poisoned = any(words in text for words in POISON)
    return {"status": "failed", "reason": f"{type(error).__name__}: {line}", "poisoned": poisoned}

"""Replay one Call on one Sample, in the worker: rebuild it, time it, and describe the time.

In the order of reading: the run; the storages that rotate, and those that are restored; the fields of the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kcap.errors import first_line, kind_and_line
from kcap.replay.group.clock import time_collective
from kcap.replay.group.peers import Peers
from kcap.replay.jobs import SEED, ReplaySession
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import Target
from kcap.replay.rebuild.operators import Operator
from kcap.replay.rebuild.persistent import persistent_storages
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.replay.roofline.cost import cost_of_call, least_work
from kcap.replay.roofline.fused import cost_of_fused
from kcap.replay.timing import graphs
from kcap.replay.timing.clock import time_call
from kcap.replay.timing.device import host_fields, is_slow_clock, read_clocks
from kcap.replay.timing.rotation import Rotation, SetSize
from kcap.replay.timing.sampling import Timing, quartiles
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, StorageKey
from kcap.schemas.derive.cost import Cost
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.results.measurement import DROPPED, SLOWED, Cache, Clocks

# The process can run nothing more on the GPU after an error with one of these phrases
POISONING_PHRASES = ("CUDA error", "device-side assert", "outside graph capture")
NO_KERNEL = ("not implemented for", "is not implemented", "Could not run", "not supported on CPU", "not compiled with")
NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
DUMMY_NOTE = "its weights of FP8 are drawn as the engine's dummy ones, nearly all zero"


@dataclass(frozen=True)
class TimingOptions:
    """The cache state to time in, and whether the profiler measures the durations of kernels, too."""

    cache: Cache = "serving"
    kernel_durations: bool = False

    @classmethod
    def of(cls, session: ReplaySession) -> TimingOptions:
        return cls(session.get("cache") or cls.cache, bool(session.get("kernels")))


class Runner:
    """Replays Calls as `rebuilder` rebuilds them."""

    def __init__(
        self, rebuilder: Rebuilder, options: TimingOptions = TimingOptions(), peers: Peers | None = None
    ) -> None:
        self.rebuilder, self.options, self.peers = rebuilder, options, peers
        self.target = rebuilder.target

    def run(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        """The fields of a Measurement that the replay gives; `seconds`: of sampling."""
        try:
            return self._time(call, sample, seconds)
        except Exception as error:
            return error_fields(error, self.target)

    def _time(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        torch.manual_seed(SEED)
        device, options = self.target.device, self.options
        clocks = read_clocks(device)
        resolved = self.rebuilder.resolve(call, sample, timed=True)
        inputs = self.rebuilder.build(resolved)
        cost = cost_of_call(call, resolved, inputs)
        touched = touched_bytes(resolved, cost)
        if self.peers:
            return self._time_together(resolved, inputs, cost, seconds, self.peers)
        rotation = rotation_of_call(options.cache, self.rebuilder, resolved, touched, inputs)
        operator = resolved.operator
        restored = restored_storages(operator, resolved.bound, resolved.rule, self.target)
        timing = time_call(device, operator.call, inputs, rotation, restored, seconds, options.kernel_durations)
        notes = [*timing.notes, *operator.notes, *([DUMMY_NOTE] if resolved.dummies else [])]
        timing = replace(timing, notes=notes)
        fields = timing_fields(timing, resolved.input_bytes, touched, device, clocks)
        if cost is None and call.launch is not None and self.rebuilder.recording is not None:
            fused = cost_of_fused(call, self.rebuilder.recording)
            cost = fused and fused.within(resolved.input_bytes)
        return {**fields, "work": least_work(cost, resolved.input_bytes - rotation.rotating)}

    def _time_together(
        self, resolved: ResolvedCall, inputs: Inputs, cost: Cost | None, seconds: float, peers: Peers
    ) -> dict[str, Any]:
        """The fields of a collective's Measurement; all that it is given is restored, since schemas do not tell."""
        restored, operator = [*inputs.buffers], resolved.operator
        timing, waited_us = time_collective(operator.call, inputs, restored, seconds, peers)
        timing = replace(timing, notes=[*timing.notes, *operator.notes])
        fields = timing_fields(timing, resolved.input_bytes, touched_bytes(resolved, cost), self.target.device)
        work = least_work(cost, resolved.input_bytes)
        return {**fields, "work": work, "ranks": peers.size, "waited_us": waited_us}


def touched_bytes(resolved: ResolvedCall, cost: Cost | None) -> int:
    """The bytes of one set of inputs that an invocation touches.

    By the Rule if it knows, else by the cost of its family (of a stack of experts only those that have tokens).
    """
    touched = resolved.touched
    return min(touched, cost.bytes) if touched == resolved.input_bytes and cost and cost.bytes else touched


def rotation_of_call(
    cache: Cache, rebuilder: Rebuilder, resolved: ResolvedCall, touched: int, inputs: Inputs
) -> Rotation:
    """Which storages of a Call rotate in the state `cache`; `touched`: the bytes that an invocation touches."""
    persistent = persistent_storages(resolved.bound, rebuilder.target)
    size, persistent_size = SetSize(resolved.input_bytes, touched), size_of_storages(persistent, inputs, touched)
    clone = partial(rebuilder.clone, resolved, inputs)
    return Rotation.of(cache, size, persistent_size, clone, partial(clone, persistent), rebuilder.target.device)


def size_of_storages(storages: Collection[StorageKey], inputs: Inputs, touched: int) -> SetSize:
    """The size of some storages of `inputs`. Of the `touched` bytes they count as those that the others cannot hold."""
    size = sum(len(inputs.buffers[key]) for key in storages)
    return SetSize(size, min(size, max(touched - (inputs.total - size), 1)))


def restored_storages(
    operator: Operator, bound: BoundCall, rule: families.ReplayRule, target: Target
) -> list[StorageKey]:
    """The storages that the operator writes to and that must be restored before each sample."""
    writes = {a.name for a in operator.schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    keys: set[StorageKey] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        if (argument.written or argument.name in writes) and argument.name not in rule.idempotent_writes:
            keys.add((memory.target_device(spec.device, target.device, target.home), spec.storage))
    return sorted(keys)


def timing_fields(
    timing: Timing, set_bytes: int, touched: int, device: str, before: Clocks | None = None
) -> dict[str, Any]:
    """The fields of a Measurement for `timing`; `before`: the GPU's clocks before it."""
    q1, median, q3 = quartiles(timing.counted_us)
    host = timing.method == "host"
    state = None if host else read_clocks(device)
    return {
        **(host_fields() if host else {}),
        "status": "ok",
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "samples_us": timing.samples_us,
        "slow_samples": timing.slow,
        "kernels": [kernel.model_dump() for kernel in timing.kernels],
        "kernel_us": graphs.kernels_us(timing.kernels) if timing.kernels else None,
        "n": timing.n,
        "stop": timing.stop,
        "method": timing.method,
        "cache": timing.cache,
        "input_sets": timing.input_sets,
        "bytes": set_bytes,
        "touched": touched,
        "floor_us": timing.floor_us,
        "notes": timing.notes + slow_notes(timing, state),
        "poisoned": timing.poisoned,
        "clocks_before": before.model_dump() if before and not host else None,
        "clocks": state.model_dump() if state else None,
    }


def slow_notes(timing: Timing, state: Clocks | None) -> list[str]:
    """Notes on samples taken at a slow clock: some, which were dropped, or all; or on a slow clock afterwards."""
    if timing.slow and len(timing.slow) < len(timing.samples_us):
        return [f"{len(timing.slow)} {DROPPED}"]
    return [SLOWED] if timing.slow or (state and is_slow_clock(state.sm_mhz, state.sm_max_mhz)) else []


def error_fields(error: Exception, target: Target) -> dict[str, Any]:
    """Skipped where this device or torch cannot run the Call at all; failed where it should have run."""
    text, line = str(error), first_line(error, 200)
    if isinstance(error, Skip):
        return {"status": "skipped", "reason": line}
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(phrase in text for phrase in NO_MEMORY):
        return {"status": "skipped", "reason": f"its results do not fit into the memory of {target.device}"}
    if isinstance(error, NotImplementedError) or any(phrase in line for phrase in NO_KERNEL):
        return {"status": "skipped", "reason": f"torch has no kernel for it on {target.device} ({line[:120]})"}
    if "no kernel image is available" in text:
        return {"status": "skipped", "reason": f"its code was compiled for another GPU ({line[:120]})"}
    if isinstance(error, RuntimeError) and not target.device.startswith(target.home):
        return {"status": "skipped", "reason": f"recorded on {target.home}, refused on {target.device}: {line}"}
    poisoned = any(phrase in text for phrase in POISONING_PHRASES)
    return {"status": "failed", "reason": kind_and_line(error, 200), "poisoned": poisoned}

"""Replay one Call on one Sample, in the worker: rebuild it, time it, and describe the time.

In the order of reading: the run; the storages that rotate, and those that are restored; which storages hold parameters
and caches, by their arguments' names; the fields of the answer.
"""

from __future__ import annotations

import math
import re
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
from kcap.replay.rebuild.memory import Target, storage_key
from kcap.replay.rebuild.operators import Operator
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
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument, Call, Sample
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.measurement import DROPPED, SLOWED, Cache, Clocks

# The process can run nothing more on the GPU after an error with one of these phrases
POISONING_PHRASES = ("CUDA error", "device-side assert", "outside graph capture")
NO_KERNEL = ("not implemented for", "is not implemented", "Could not run", "not supported on CPU", "not compiled with")
NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")


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
        timing = replace(timing, notes=[*timing.notes, *operator.notes])
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


# Which storages hold what the model keeps from step to step, parameters and key-value caches, decides what rotates in
# the cache state `serving`. A step of many layers reads each of them once, from memory: the other layers have evicted
# them from the L2. Activations rotate only if the L2 cannot hold them: one kernel leaves them there for the next. A
# Recording has no addresses, so these rules go by names and shapes, in this order:
#
# 1. A name that says so in all libraries: `weight`, `bias`, `w13`, `mat2`, `key_cache`, and `b` beside an `a`, with its
#    scales and zeros (`b_scales`); but not `topk_weights`, which a router computed by its own `router_weight`. `matmul`
#    calls it `other`: a matrix is a parameter, a stack of matrices is not.
# 2. `k`, `v` and `kv` are caches beside a table of pages; otherwise they are activations.
# 3. A kernel of inductor's has no names: floats that it does not write, with other rows than what it writes (`[4096]`
#    beside `[64, 4096]`, but not `[2, 32, 4096]`), are parameters.
# 4. Rotary tables do not rotate (`cos_sin_cache`, or a table narrower than the rows that inductor's kernel writes): all
#    layers read the same rows of one, the keys' kernel right after the queries'.
#
# Everything else is an activation, and so is every table of indices.

STORED_WORDS = r"q?weights?|bias|gamma|w\d*|mat2|(k|v|kv)?_?caches?|(k|v|kv)_buffer|kv_pool"
STORED_SUFFIX = r"(_(scales?|scale_inv|zeros?|zero_points?|zp|bias|sf|global_scale))?"
STORED_NAME = re.compile(rf"(.*_)?({STORED_WORDS}){STORED_SUFFIX}")
SECOND_FACTOR = re.compile(  # of a product a @ b
    rf"(arg_|.*scales?_)?b{STORED_SUFFIX}|b_(q_weight|meta)|group_(scales|zeros)"
)
ADAPTER_NAME = "lora"  # vLLM's `lora_ptr`; its tables of indices end with the word, too
ROUTER_NAME = re.compile(r"top_?k|rout(?!er_weight$)|expert_weights")
PAGED_NAMES = frozenset({"k", "v", "kv", "key", "value"})
PAGE_TABLE_NAME = re.compile(r"(block|page)_?tables?|(paged_)?kv_(indices|page_indices)")
ROTARY_NAME = re.compile(r"((.*_)?(cos|sin)|freqs?_cis|rotary_cache)(_.*)?")
INDUCTOR_POINTER = re.compile(r"(in|out|in_out)_ptr\d+")


def persistent_storages(bound: BoundCall, target: Target) -> frozenset[StorageKey]:
    """The storages of `bound` that hold parameters or caches."""
    names = {plain_name(argument.name) for argument in bound.args}
    paged = any(PAGE_TABLE_NAME.fullmatch(name) for name in names)
    product = "a" in names or "arg_a" in names
    written = rows_written(bound)
    persistent: set[StorageKey] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        name = plain_name(argument.name)
        matmul_weight = bound.base == "matmul" and name == "other" and len(spec.shape) == 2
        unnamed = INDUCTOR_POINTER.fullmatch(name) and not is_written(argument) and is_inductor_parameter(spec, written)
        if is_persistent_name(name, paged, product) or matmul_weight or unnamed:
            persistent.add(storage_key(spec, target))
    return frozenset(persistent)


def is_persistent_name(name: str, paged: bool = False, product: bool = False) -> bool:
    """Whether an argument of this name is a parameter or a cache.

    `paged`, `product`: there is a table of pages, or a first factor `a`, beside it.
    """
    name = plain_name(name)
    if ROUTER_NAME.search(name) or ROTARY_NAME.fullmatch(name):
        return False
    return (
        bool(STORED_NAME.fullmatch(name))
        or name == ADAPTER_NAME
        or (paged and name in PAGED_NAMES)
        or (product and bool(SECOND_FACTOR.fullmatch(name)))
    )


def plain_name(name: str | None) -> str:
    """Lower case, without the `_ptr` that kernels append."""
    lower = (name or "").lower()
    return lower if INDUCTOR_POINTER.fullmatch(lower) else lower.removesuffix("_ptr")


def is_written(argument: Argument) -> bool:
    return argument.written or plain_name(argument.name).startswith(("out_ptr", "in_out_ptr"))


def rows_written(bound: BoundCall) -> dict[int, int]:
    """The row counts that the kernel's outputs may have, each with its shortest row; none if no output is known."""
    shortest: dict[int, int] = {}
    for path, spec in bound.tensors():
        if is_written(bound.holder(path)) and len(spec.shape) > 1 and spec.numel:
            for count in row_counts(spec):
                shortest[count] = min(shortest.get(count, spec.numel), spec.numel // spec.shape[0])
    return shortest


def is_inductor_parameter(spec: TensorSpec, written: dict[int, int]) -> bool:
    """Whether the rows of a tensor that a kernel reads are not those that it writes, and it is no rotary table.

    A tensor without dimensions is none: it has no rows.
    """
    if not written or not spec.shape or BY_NAME[spec.dtype].kind != "float":
        return False
    return len(spec.shape) == 1 or (not row_counts(spec) & written.keys() and spec.shape[-1] >= min(written.values()))


def row_counts(spec: TensorSpec) -> set[int]:
    """The row counts of a tensor: leading dimensions may be a batch of sequences, later ones heads."""
    return {math.prod(spec.shape[:end]) for end in range(1, len(spec.shape))}


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

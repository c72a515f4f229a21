"""Replay one Call on one Sample, inside the worker: rebuilt, timed, its time told.

Which of its storages hold what the model keeps, parameters and key-value caches, decides what rotates. A step of many
layers reads each of them once, from memory: whatever the L2 held of them, the other layers' have driven out. What one
kernel hands to the next, the activations, it leaves in the L2, as far as that has room. In the cache state `serving`
the first rotate and the others stay where they are. A record has no addresses, so the rule goes by what a Call tells,
in this order:

1. A name that says it, as all libraries name theirs: `weight`, `bias`, `w13`, `mat2`, `key_cache`, and `b` beside an
   `a`, each with its scales and zeros (`b_scales`); not `topk_weights`, which a router made. A `matmul` calls it
   `other`: a matrix is one, a stack of them is not.
2. `k`, `v` and `kv` are caches where a table of pages is an argument too; otherwise they are activations.
3. A kernel of inductor's names nothing: floats that it does not write to, of other rows than what it writes to
   (`[4096]` beside `[64, 4096]`, but not `[2, 32, 4096]`), are parameters.
4. But rotary tables stay (`cos_sin_cache`, or a table narrower than the rows that inductor's kernel writes): all layers
   read the same rows of one, the keys' kernel right behind the queries'.

Everything else is an activation, and so is every table of indices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kcap.replay.jobs import SEED
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import Target, storage_key
from kcap.replay.rebuild.operators import Operator
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.replay.roofline.cost import cost_of_call, least_work
from kcap.replay.timing import graphs
from kcap.replay.timing.clock import time_on
from kcap.replay.timing.device import host_fields, is_slow_clock, read_clocks
from kcap.replay.timing.rotation import Rotation, SetSize
from kcap.replay.timing.sampling import Timing, quartiles
from kcap.schemas.derive import bound_call, families
from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, StorageKey
from kcap.schemas.derive.cost import Cost
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.measurement import DROPPED, SLOWED, Cache, Clocks


@dataclass(frozen=True)
class TimingOptions:
    """How to time: in which cache state, and whether to ask the profiler for the kernels' durations, too."""

    cache: Cache = "serving"
    kernels: bool = False

    @classmethod
    def of(cls, session: dict[str, Any]) -> TimingOptions:
        """What a worker's session says."""
        return cls(session.get("cache") or cls.cache, bool(session.get("kernels")))


class Runner:
    """Replays Calls with what `rebuilder` makes of them."""

    def __init__(self, rebuilder: Rebuilder, how: TimingOptions = TimingOptions()) -> None:
        self.rebuilder, self.how = rebuilder, how
        self.target = rebuilder.target

    def run(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        """The fields of a Measurement that this replay decides."""
        try:
            return self._time(call, sample, seconds)
        except Exception as error:
            return error_fields(error, self.target)

    def _time(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        torch.manual_seed(SEED)
        before = read_clocks(self.target.device)
        decided = self.rebuilder.decide(call, sample, cut=True)
        first = self.rebuilder.build(decided)
        cost = cost_of_call(call, decided)
        touched = touched_bytes(decided, cost)
        rotation = rotation_of_call(self.how.cache, self.rebuilder, decided, touched, first)
        timing = self._clock(decided, first, rotation, seconds)
        timing = replace(timing, notes=[*timing.notes, *decided.operator.notes])
        told = timing_fields(timing, decided.total, touched, self.target.device, before)
        return {**told, "work": least_work(cost, decided.total - rotation.rotating)}

    def _clock(self, decided: ResolvedCall, first: Inputs, rotation: Rotation, seconds: float) -> Timing:
        operator = decided.operator
        restored = restored_storages(operator, decided.bound, decided.rule, self.target)
        return time_on(self.target.device, operator.call, first, rotation, restored, seconds, self.how.kernels)


def touched_bytes(decided: ResolvedCall, cost: Cost | None) -> int:
    """The bytes of one set that an invocation reaches: what the Rule says, or else what it must move by its family (of
    a stack of experts those that have tokens)."""
    told = decided.touched
    return min(told, cost.bytes) if told == decided.total and cost and cost.bytes else told


def rotation_of_call(
    cache: Cache, rebuilder: Rebuilder, decided: ResolvedCall, reached: int, first: Inputs
) -> Rotation:
    """What of a Call's storages goes round in the state `cache`, `reached` bytes of which an invocation touches."""
    moved = persistent_storages(decided.bound, rebuilder.target)
    whole, clone = SetSize(decided.total, reached), partial(rebuilder.clone, decided, first)
    return Rotation.of(
        cache, whole, size_of_storages(moved, first, reached), clone, partial(clone, moved), rebuilder.target.device
    )


def size_of_storages(moved: Collection[bound_call.StorageKey], inputs: Inputs, reached: int) -> SetSize:
    """That of the storages `moved`; of all of `inputs` an invocation reaches so many bytes, the others' first."""
    size = sum(len(inputs.buffers[key]) for key in moved)
    return SetSize(size, min(size, max(reached - (inputs.total - size), 1)))


def restored_storages(
    operator: Operator, bound: BoundCall, rule: families.ReplayRule, target: Target
) -> list[bound_call.StorageKey]:
    """The storages that the operator writes to and that must be restored before it runs again."""
    writes = {a.name for a in operator.schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    keys: set[bound_call.StorageKey] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        if (argument.written or argument.name in writes) and argument.name not in rule.idempotent_writes:
            keys.add((memory.target_device(spec.device, target.device, target.home), spec.storage))
    return sorted(keys)


def timing_fields(
    timing: Timing, set_bytes: int, touched: int, device: str, before: Clocks | None = None
) -> dict[str, Any]:
    """What a Measurement says of `timing`; `before`: the GPU's state before it."""
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
        "poisoned": timing.spoiled,
        "clocks_before": before.model_dump() if before and not host else None,
        "clocks": state.model_dump() if state else None,
    }


def slow_notes(timing: Timing, state: Clocks | None) -> list[str]:
    """Notes on samples that a slow clock spoiled: some, which are dropped, or all, and after them."""
    if timing.slow and len(timing.slow) < len(timing.samples_us):
        return [f"{len(timing.slow)} {DROPPED}"]
    return [SLOWED] if timing.slow or (state and is_slow_clock(state.sm_mhz, state.sm_max_mhz)) else []


NO_KERNEL = ("not implemented for", "is not implemented", "Could not run", "not supported on CPU", "not compiled with")


NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")


POISONED = ("CUDA error", "device-side assert", "outside graph capture")  # the process can run nothing more on the GPU


def error_fields(error: Exception, target: Target) -> dict[str, Any]:
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
    poisoned = any(words in text for words in POISONED)
    return {"status": "failed", "reason": f"{type(error).__name__}: {line}", "poisoned": poisoned}


STORED_WORDS = r"q?weights?|bias|gamma|w\d*|mat2|(k|v|kv)?_?caches?|(k|v|kv)_buffer|kv_pool"


STORED_SUFFIX = r"(_(scales?|scale_inv|zeros?|zero_points?|zp|bias|sf|global_scale))?"


STORED_NAME = re.compile(rf"(.*_)?({STORED_WORDS}){STORED_SUFFIX}")


SECOND_FACTOR = re.compile(rf"(arg_|.*scales?_)?b{STORED_SUFFIX}|b_(q_weight|meta)")  # of a product a @ b


ROUTER_NAME = re.compile(r"top_?k|rout|expert_weights")


PAGED_NAMES = frozenset({"k", "v", "kv", "key", "value"})


PAGE_TABLE_NAME = re.compile(r"(block|page)_?tables?|(paged_)?kv_(indices|page_indices)")


ROTARY_NAME = re.compile(r"((.*_)?(cos|sin)|freqs?_cis|rotary_cache)(_.*)?")


INDUCTOR_POINTER = re.compile(r"(in|out|in_out)_ptr\d+")


def persistent_storages(bound: BoundCall, target: Target) -> frozenset[StorageKey]:
    """The storages of `bound` that hold parameters or caches."""
    names = {plain_name(argument.name) for argument in bound.args}
    paged = any(PAGE_TABLE_NAME.fullmatch(name) for name in names)
    written = written_rows(bound)
    found: set[StorageKey] = set()
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        name = plain_name(argument.name)
        product = "a" in names or "arg_a" in names
        unnamed = INDUCTOR_POINTER.fullmatch(name) and not argument.written and is_inductor_parameter(spec, written)
        if is_persistent_name(name, paged, product) or is_matmul_weight(bound, name, spec) or unnamed:
            found.add(storage_key(spec, target))
    return frozenset(found)


def is_persistent_name(name: str, paged: bool = False, product: bool = False) -> bool:
    """Whether an argument of this name is a parameter or a cache; `paged`, `product`: what is beside it."""
    name = plain_name(name)
    if ROUTER_NAME.search(name) or ROTARY_NAME.fullmatch(name):
        return False
    return (
        bool(STORED_NAME.fullmatch(name))
        or (paged and name in PAGED_NAMES)
        or (product and bool(SECOND_FACTOR.fullmatch(name)))
    )


def is_matmul_weight(bound: BoundCall, name: str, spec: TensorSpec) -> bool:
    """Whether a `matmul` multiplies its rows by this matrix."""
    return bound.base == "matmul" and name == "other" and len(spec.shape) == 2


def plain_name(name: str | None) -> str:
    """Lower case, without the `_ptr` that kernels add."""
    lower = (name or "").lower()
    return lower if INDUCTOR_POINTER.fullmatch(lower) else lower.removesuffix("_ptr")


def written_rows(bound: BoundCall) -> dict[int, int]:
    """The rows that what the kernel writes may have, and the fewest elements of one; none where nothing says that it is
    written."""
    found: dict[int, int] = {}
    for path, spec in bound.tensors():
        argument = bound.holder(path)
        writes = argument.written or plain_name(argument.name).startswith(("out_ptr", "in_out_ptr"))
        if writes and len(spec.shape) > 1 and spec.numel:
            for count in row_counts(spec):
                found[count] = min(found.get(count, spec.numel), spec.numel // spec.shape[0])
    return found


def is_inductor_parameter(spec: TensorSpec, written: dict[int, int]) -> bool:
    """Whether a tensor that a kernel reads has no row for each row of what it writes, and is no rotary table."""
    if not written or BY_NAME[spec.dtype].kind != "float":
        return False
    return len(spec.shape) == 1 or (not row_counts(spec) & written.keys() and spec.shape[-1] >= min(written.values()))


def row_counts(spec: TensorSpec) -> set[int]:
    """How many rows a tensor may be said to have: leading dimensions may be a batch of sequences, later ones heads."""
    return {math.prod(spec.shape[:end]) for end in range(1, len(spec.shape))}

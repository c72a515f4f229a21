"""The Calls of a Program, ready to run: each rebuilt once, its weights and caches once for each of its invocations.

They share activations, as in an engine: what one wrote, the next finds in the caches. No Recording tells which output
is which input, so floats of one dtype and similar size (up to the next power of two) share buffers: the first such
storage of each Call the first buffer, the second the second. Weights are scaled so that numbers survive the flow from
Call to Call, and what kernels write to is restored before each sample: else numbers grow from sample to sample.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from kcap.replay.calls.runner import (
    error_fields,
    restored_storages,
    size_of_storages,
    touched_bytes,
)
from kcap.replay.jobs import SEED
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import BUFFER_ALIGN, Target, buffer_sizes, mapped_storages, storage_key
from kcap.replay.rebuild.persistent import DUMMY_DEVIATION, persistent_storages
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.replay.roofline.cost import cost_of_call
from kcap.replay.timing.rotation import cold_sets
from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, StorageKey
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.recording.values import TensorSpec, tensors

SHARE_FOR_SETS = 0.5  # of the free memory, for all sets but the first


@dataclass
class PreparedCall:
    """One Call of the Program, which has `count` invocations of it. `failed`: why it does not run, as answer fields.

    `slots`: of each storage that is an activation, the buffer that it shares with other Calls. `apart`: no other Call
    reads what it writes.
    """

    call: Call
    count: int
    target: Target
    resolved: ResolvedCall | None = None
    sets: list[Inputs] = field(default_factory=list)
    persistent: frozenset[StorageKey] = frozenset()
    slots: dict[StorageKey, BufferSlot] = field(default_factory=dict)
    restored: list[StorageKey] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    turn: int = 0
    apart: bool = False

    def run(self) -> None:
        """One invocation, each time on the next set."""
        self.call_on(self.next())

    def next(self) -> Inputs:
        """The set that is next."""
        self.turn += 1
        return self.sets[(self.turn - 1) % len(self.sets)]

    def call_on(self, inputs: Inputs) -> Any:
        """One invocation on `inputs`; what the operator returns."""
        assert self.resolved is not None
        return self.resolved.operator.call(*inputs.args, **inputs.kwargs)

    @property
    def set_bytes(self) -> int:
        """The bytes of another set: its weights and caches."""
        return sum(len(self.sets[0].buffers[key]) for key in self.persistent)

    @property
    def touched(self) -> int:
        """Of `set_bytes`, those that one invocation touches."""
        assert self.resolved is not None
        touched = touched_bytes(self.resolved, cost_of_call(self.call, self.resolved, self.sets[0]))
        return size_of_storages(self.persistent, self.sets[0], touched).touched


class PreparedCalls:
    """The Calls of one Program, which share `activations`."""

    def __init__(
        self,
        rebuilder: Rebuilder,
        counts: Mapping[int, int],
        samples: Mapping[int, int | None],
    ) -> None:
        assert rebuilder.recording is not None
        torch.manual_seed(SEED)
        self.rebuilder, self.recording = rebuilder, rebuilder.recording
        self.target: Target = rebuilder.target
        self.activations = Activations()
        self.all = {number: self._part(number, count, samples.get(number)) for number, count in counts.items()}
        for part, sets in self._set_counts().items():
            self._guarded(self.all[part], partial(self._clone, self.all[part], sets))

    @property
    def good(self) -> dict[int, PreparedCall]:
        return {number: part for number, part in self.all.items() if part.failed is None}

    @property
    def bytes(self) -> int:
        """The bytes of all inputs."""
        return sum({id(b): len(b) for p in self.good.values() for s in p.sets for b in s.buffers.values()}.values())

    def _part(self, number: int, count: int, line: int | None) -> PreparedCall:
        part = PreparedCall(self.recording.calls[number], count, self.target)
        sample = None if line is None else self.recording.samples[line]
        self._guarded(part, partial(self._build, part, sample))
        return part

    def _build(self, part: PreparedCall, sample: Sample | None) -> None:
        resolved = part.resolved = self.rebuilder.resolve(part.call, sample, timed=True)
        part.persistent = persistent_storages(resolved.bound, self.target)
        part.restored = restored_storages(resolved.operator, resolved.bound, resolved.rule, self.target)
        part.slots = self.activations.slots(resolved.bound, self.target, part.persistent)
        buffers = {key: self.activations.buffer(slot) for key, slot in part.slots.items()}
        part.sets = [self.rebuilder.build(resolved, buffers)]
        scale_weights(resolved.bound, self.target, part.sets[0].buffers, part.persistent, resolved.dummies)

    def _guarded(self, part: PreparedCall, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            part.failed, part.sets = error_fields(error, self.target), []

    def _set_counts(self) -> dict[int, int]:
        """How many sets each Call gets: one for each invocation or, if memory is short, as many as keep them cold."""
        sets_by_call = {number: part.count for number, part in self.good.items() if part.persistent}
        extra_bytes = sum((sets - 1) * self.all[number].set_bytes for number, sets in sets_by_call.items())
        if extra_bytes <= SHARE_FOR_SETS * memory.free_bytes(self.target.device):
            return sets_by_call
        return {number: min(sets, self._min_sets(self.all[number])) for number, sets in sets_by_call.items()}

    def _min_sets(self, part: PreparedCall) -> int:
        if not self.target.device.startswith("cuda"):
            return 1
        return cold_sets(part.touched, self.target.device)

    def _clone(self, part: PreparedCall, sets: int) -> None:
        """Make `sets` of them, or as many as memory has room for."""
        assert part.resolved is not None
        for _ in range(sets - 1):
            if part.set_bytes > SHARE_FOR_SETS * memory.free_bytes(self.target.device):
                return
            part.sets.append(self.rebuilder.clone(part.resolved, part.sets[0], part.persistent))


BufferKind: TypeAlias = tuple[str, str, int]  # device, dtype, bytes up to the next power of two
BufferSlot: TypeAlias = tuple[str, str, int, int]  # a BufferKind, and the number among a Call's of that kind


class Activations:
    """The shared buffers of one Program."""

    def __init__(self) -> None:
        self.buffers: dict[BufferSlot, torch.Tensor] = {}

    def slots(self, bound: BoundCall, target: Target, excluded: frozenset[StorageKey]) -> dict[StorageKey, BufferSlot]:
        """The slot of each storage of `bound` that holds floats of one dtype, except those in `excluded`.

        Storages on the host are not shared, nor those that a GPU reaches there: they may have to be pinned.
        """
        sizes = buffer_sizes(bound, target.device, target.home)
        mapped = mapped_storages(bound, target)
        numbers: Counter[BufferKind] = Counter()
        slots: dict[StorageKey, BufferSlot] = {}
        for key, dtype in float_storages(bound, target).items():
            if key in excluded or key[0] != target.device or key in mapped:
                continue
            kind = buffer_kind(key[0], dtype, sizes[key])
            slots[key] = (*kind, numbers[kind])
            numbers[kind] += 1
        return slots

    def buffer(self, slot: BufferSlot) -> torch.Tensor:
        """The bytes that all storages in this slot share."""
        if slot not in self.buffers:
            device, _, size, _ = slot
            self.buffers[slot] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.buffers[slot]

    def all_of(self, kind: BufferKind) -> list[torch.Tensor]:
        """The buffers of this kind."""
        return [buffer for slot, buffer in self.buffers.items() if slot[:3] == kind]

    @property
    def bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())


def buffer_kind(device: str, dtype: str, size: int) -> BufferKind:
    """The kind of a storage of `size` bytes."""
    return device, dtype, 1 << (max(size, BUFFER_ALIGN) - 1).bit_length()


def float_storages(bound: BoundCall, target: Target) -> dict[StorageKey, str]:
    """The storages that hold only floats of one dtype, with that dtype."""
    dtypes: dict[StorageKey, set[str]] = {}
    for _, spec in bound.tensors():
        dtypes.setdefault(storage_key(spec, target), set()).add(spec.dtype)
    unmixed = {key: next(iter(names)) for key, names in dtypes.items() if len(names) == 1}
    return {key: name for key, name in unmixed.items() if BY_NAME[name].kind == "float"}


MULTIPLIED_DTYPES = ("bfloat16", "float16", "float32")
QUANTIZED_DTYPES = {  # how many numbers an element holds, and their standard deviation, as they are drawn
    "float8_e4m3fn": (1, 1.0),
    "float8_e5m2": (1, 1.0),
    "int8": (1, 74.0),
    "int32": (8, 4.6),  # words of four bits each
}
SCALE_NAME = re.compile(r"scale|zero")


def scale_weights(
    bound: BoundCall,
    target: Target,
    buffers: Mapping[StorageKey, torch.Tensor],
    parameters: Collection[StorageKey],
    dummies: Collection[StorageKey] = (),
) -> None:
    """Scale weights so that their product with standard normal numbers has about the same magnitude.

    Else numbers overflow after some layers, and kernels are faster on nan or slower on inf. The factor is a power of
    two, which leaves the mantissas, on which a product's power draw depends. Of a quantized weight its scales take it.
    `dummies`: those of `parameters` that were drawn as dummy weights.
    """
    quantized = [spec for _, spec in bound.tensors() if spec.dtype in QUANTIZED_DTYPES and len(spec.shape) in (2, 3)]
    weights = [spec for spec in quantized if storage_key(spec, target) in parameters]
    for spec, key in weight_matrices(bound, target):
        if key in parameters:
            scaled = [weight for weight in weights if weight.numel > spec.numel] if is_scale(bound, spec) else []
            weight = max(scaled, key=lambda one: one.numel, default=spec)
            dummy = storage_key(weight, target) in dummies
            buffers[key].view(torch_dtype(spec.dtype, Skip)).mul_(2.0 ** -growth(weight, dummy))


def growth(weight: TensorSpec, dummy: bool) -> int:
    """The power of two by which its products with standard normal numbers are larger than these."""
    codes, deviation = (1, DUMMY_DEVIATION) if dummy else QUANTIZED_DTYPES.get(weight.dtype, (1, 1.0))
    rows, columns = weight.shape[-2:]
    return round(math.log2(rows * columns * codes) / 4 + math.log2(deviation))


def is_scale(bound: BoundCall, spec: TensorSpec) -> bool:
    """Whether it scales a quantized weight, by its name, or as it stands beside one in a list."""
    holder = next(argument for argument in bound.args if any(spec is one for _, one in tensors(argument.value)))
    return isinstance(holder.value, list) or bool(SCALE_NAME.search(holder.name or ""))


def weight_matrices(bound: BoundCall, target: Target) -> Iterator[tuple[TensorSpec, StorageKey]]:
    """The matrices of floats, or stacks of them, that share their storage with nothing."""
    specs = [(spec, storage_key(spec, target)) for _, spec in bound.tensors()]
    times = Counter(key for _, key in specs)
    for spec, key in specs:
        if spec.dtype in MULTIPLIED_DTYPES and len(spec.shape) in (2, 3) and times[key] == 1 and spec.numel:
            yield spec, key


MAX_RESTORED_BYTES = 1 << 30  # of all; what is beyond is not restored


class ProgramSnapshot:
    """The content, before anything ran, of every storage that some Call writes to; called, it restores them."""

    def __init__(self, parts: Iterable[PreparedCall]) -> None:
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.left = 0  # storages that were too large
        handled: set[int] = set()
        room = MAX_RESTORED_BYTES
        for buffer in (s.buffers[key] for part in parts for s in part.sets for key in part.restored):
            if id(buffer) in handled:
                continue
            handled.add(id(buffer))
            if len(buffer) > room:
                self.left += 1
                continue
            room -= len(buffer)
            self.saved.append((buffer, buffer.clone()))

    @property
    def notes(self) -> list[str]:
        """A note on storages that are not restored."""
        return [f"written to, and too large to be put back between samples: {self.left}"] if self.left else []

    def __call__(self) -> None:
        for buffer, content in self.saved:
            buffer.copy_(content)

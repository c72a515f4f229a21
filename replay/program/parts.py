"""The Calls of a Program ready to run: each rebuilt once, its weights and caches once for each of its invocations.

They share memory, as an engine's activations do: what one wrote, the next finds in the caches. Which output is which
input no record tells, so floats of one dtype and of like size (up to the next power of two) share a buffer, the first
such storage of each Call the first one, the second the second. Weights are of a size that the numbers which flow from
Call to Call survive, and what kernels write to is put back before each sample: else numbers grow from sample to sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from kcap.replay.calls.runner import (
    error_fields,
    persistent_storages,
    restored_storages,
    size_of_storages,
    touched_bytes,
)
from kcap.replay.jobs import SEED
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import BUFFER_ALIGN, Target, buffer_sizes, storage_key
from kcap.replay.rebuild.rebuild import Rebuilder, ResolvedCall
from kcap.replay.roofline.cost import cost_of_call
from kcap.replay.timing.rotation import cold_sets
from kcap.schemas.derive import bound_call
from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, StorageKey
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.recording.values import TensorSpec

SHARE_FOR_SETS = 0.5  # of the free memory, for all sets but the first


@dataclass
class Part:
    """One Call of the Program, `count` times in it. `failed`: what a Measurement says of one that does not run."""

    call: Call
    count: int
    target: Target
    decided: ResolvedCall | None = None
    sets: list[Inputs] = field(default_factory=list)
    moved: frozenset[bound_call.StorageKey] = frozenset()
    places: dict[bound_call.StorageKey, BufferPlace] = field(default_factory=dict)
    restored: list[bound_call.StorageKey] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    turn: int = 0

    def run(self) -> None:
        """One invocation, each time on the next set."""
        self.call_on(self.next())

    def next(self) -> Inputs:
        """The set whose turn it is."""
        self.turn += 1
        return self.sets[(self.turn - 1) % len(self.sets)]

    def call_on(self, inputs: Inputs) -> Any:
        """One invocation on `inputs`; what the operator returns."""
        assert self.decided is not None
        return self.decided.operator.call(*inputs.args, **inputs.kwargs)

    @property
    def set_bytes(self) -> int:
        """Of one more set: its weights and caches."""
        return sum(len(self.sets[0].buffers[key]) for key in self.moved)

    @property
    def touched(self) -> int:
        """Of these, what one invocation can reach."""
        assert self.decided is not None
        reached = touched_bytes(self.decided, cost_of_call(self.call, self.decided))
        return size_of_storages(self.moved, self.sets[0], reached).touched


class Parts:
    """The Calls of one Program. `activations` are shared by all of them, unless `shared` is False."""

    def __init__(
        self,
        rebuilder: Rebuilder,
        counts: Mapping[int, int],
        samples: Mapping[int, int | None],
        shared: bool = True,
    ) -> None:
        assert rebuilder.recording is not None
        torch.manual_seed(SEED)
        self.rebuilder, self.recording = rebuilder, rebuilder.recording
        self.target: Target = rebuilder.target
        self.activations, self.shared = Activations(), shared
        self.all = {number: self._part(number, count, samples.get(number)) for number, count in counts.items()}
        for part, sets in self._shares().items():
            self._clone(self.all[part], sets)

    @property
    def good(self) -> dict[int, Part]:
        return {number: part for number, part in self.all.items() if part.failed is None}

    @property
    def bytes(self) -> int:
        """Of all inputs that were made."""
        return sum({id(b): len(b) for p in self.good.values() for s in p.sets for b in s.buffers.values()}.values())

    def _part(self, number: int, count: int, line: int | None) -> Part:
        part = Part(self.recording.calls[number], count, self.target)
        sample = None if line is None else self.recording.samples[line]
        self._guarded(part, partial(self._build, part, sample))
        return part

    def _build(self, part: Part, sample: Sample | None) -> None:
        decided = part.decided = self.rebuilder.decide(part.call, sample, cut=True)
        part.moved = persistent_storages(decided.bound, self.target)
        part.restored = restored_storages(decided.operator, decided.bound, decided.rule, self.target)
        if self.shared:
            part.places = self.activations.places(decided.bound, self.target, part.moved)
        given = {key: self.activations.buffer(place) for key, place in part.places.items()}
        part.sets = [self.rebuilder.build(decided, given)]
        scale_weights(decided.bound, self.target, part.sets[0].buffers, part.moved)

    def _guarded(self, part: Part, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            part.failed, part.sets = error_fields(error, self.target), []

    def _shares(self) -> dict[int, int]:
        """How many sets each Call gets: one for each invocation, or, for want of memory, what keeps them cold."""
        wanted = {number: part.count for number, part in self.good.items() if part.moved}
        needed = sum((sets - 1) * self.all[number].set_bytes for number, sets in wanted.items())
        if needed <= SHARE_FOR_SETS * memory.free_bytes(self.target.device):
            return wanted
        return {number: min(sets, self._least(self.all[number])) for number, sets in wanted.items()}

    def _least(self, part: Part) -> int:
        if not self.target.device.startswith("cuda"):
            return 1
        return cold_sets(part.touched, self.target.device)

    def _clone(self, part: Part, sets: int) -> None:
        """`sets` of them, or as many as there is room for."""
        assert part.decided is not None
        for _ in range(sets - 1):
            if part.set_bytes > SHARE_FOR_SETS * memory.free_bytes(self.target.device):
                return
            part.sets.append(self.rebuilder.clone(part.decided, part.sets[0], part.moved))


BufferKind: TypeAlias = tuple[str, str, int]  # device, dtype, bytes up to the next power of two


BufferPlace: TypeAlias = tuple[str, str, int, int]  # a Kind, and which of a Call's it is


class Activations:
    """The buffers of one Program."""

    def __init__(self) -> None:
        self.buffers: dict[BufferPlace, torch.Tensor] = {}

    def places(self, bound: BoundCall, target: Target, kept: frozenset[StorageKey]) -> dict[StorageKey, BufferPlace]:
        """The place of each storage of `bound` on the target that holds floats of one dtype, except those in `kept`.

        The host's are the Call's own: they may have to be pinned.
        """
        sizes = buffer_sizes(bound, target.device, target.home)
        seen: Counter[BufferKind] = Counter()
        found: dict[StorageKey, BufferPlace] = {}
        for key, dtype in float_storages(bound, target).items():
            if key in kept or key[0] != target.device:
                continue
            kind = buffer_kind(key[0], dtype, sizes[key])
            found[key] = (*kind, seen[kind])
            seen[kind] += 1
        return found

    def buffer(self, place: BufferPlace) -> torch.Tensor:
        """The bytes that all who have this place share."""
        if place not in self.buffers:
            device, _, size, _ = place
            self.buffers[place] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.buffers[place]

    def all_of(self, kind: BufferKind) -> list[torch.Tensor]:
        """The buffers of this kind."""
        return [buffer for place, buffer in self.buffers.items() if place[:3] == kind]

    @property
    def bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())


def buffer_kind(device: str, dtype: str, size: int) -> BufferKind:
    """The kind of a storage of `size` bytes."""
    return device, dtype, 1 << (max(size, BUFFER_ALIGN) - 1).bit_length()


def float_storages(bound: BoundCall, target: Target) -> dict[StorageKey, str]:
    """The storages that hold floats of one dtype and nothing else, with that dtype."""
    dtypes: dict[StorageKey, set[str]] = {}
    for _, spec in bound.tensors():
        dtypes.setdefault(storage_key(spec, target), set()).add(spec.dtype)
    single = {key: next(iter(names)) for key, names in dtypes.items() if len(names) == 1}
    return {key: name for key, name in single.items() if BY_NAME[name].kind == "float"}


MULTIPLIED_DTYPES = ("bfloat16", "float16", "float32")


def scale_weights(
    bound: BoundCall, target: Target, buffers: Mapping[StorageKey, torch.Tensor], parameters: Collection[StorageKey]
) -> None:
    """Make weights of standard normal numbers, so that their product with such numbers has about the same size.

    Else numbers overflow after some layers, and kernels are faster on nan, or slower on inf. By a power of two: the
    mantissas, on which a product's power depends, stay.
    """
    for spec, key in weight_matrices(bound, target):
        if key in parameters:
            rows, columns = spec.shape[-2:]
            buffers[key].view(torch_dtype(spec.dtype, Skip)).mul_(2.0 ** -round(math.log2(rows * columns) / 4))


def weight_matrices(bound: BoundCall, target: Target) -> Iterator[tuple[TensorSpec, StorageKey]]:
    """The matrices of floats, or stacks of them, that have a storage for themselves."""
    specs = [(spec, storage_key(spec, target)) for _, spec in bound.tensors()]
    times = Counter(key for _, key in specs)
    for spec, key in specs:
        if spec.dtype in MULTIPLIED_DTYPES and len(spec.shape) in (2, 3) and times[key] == 1 and spec.numel:
            yield spec, key


MOST_RESTORED_BYTES = 1 << 30  # what is beyond is left as it is


class RestoredStorages:
    """The content of every storage that some Call writes to, each once, as it was before anything ran."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.left = 0  # storages that were too large
        seen: set[int] = set()
        room = MOST_RESTORED_BYTES
        for buffer in (s.buffers[key] for part in parts for s in part.sets for key in part.restored):
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if len(buffer) > room:
                self.left += 1
                continue
            room -= len(buffer)
            self.saved.append((buffer, buffer.clone()))

    @property
    def notes(self) -> list[str]:
        """What to know of what is not put back."""
        return [f"written to, and too large to be put back between samples: {self.left}"] if self.left else []

    def __call__(self) -> None:
        for buffer, content in self.saved:
            buffer.copy_(content)

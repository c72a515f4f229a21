"""What one Call of a Program writes, the next one reads: it lies in the same memory, as in the engine, and so in the
caches when it is read.

A record has no addresses. But Calls come in their order, and what was written last is mostly read first. So of each
kind of storage (kcap.replay.program.parts) the first argument that is read lies where was written last, the
second where before that; what is only written goes where nothing is read. What an operator returns is written, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kcap.replay.calls.runner import plain_name
from kcap.replay.program.parts import Activations, BufferKind, Part, Parts, buffer_kind
from kcap.replay.rebuild.memory import reached_bytes, storage_key
from kcap.replay.rebuild.rebuild import with_buffers
from kcap.replay.roofline import cost
from kcap.schemas.derive.bound_call import StorageKey

RECENT_BUFFERS = 4  # buffers of one kind of which is known when they were written
ONLY_WRITTEN = re.compile(r"out(put)?s?\d*|out_ptr\d+|result|dst|c|o")
CHECKED_DTYPES = ("bfloat16", "float16", "float32", "float64")
SMALLEST, LARGEST = 1e-20, 1e6  # absolute values of numbers as engines have them
MOST_LOST_SHARE, CHECKED_BYTES = 0.01, 1 << 20  # a share, and bytes
CHECKED_RUNS = 2  # that are looked at: a run begins with what the one before has left
NOT_SHARED = "each kernel has activations of its own: handed on, numbers overflow or vanish"


class Flow:
    """One run of a Program, each of whose invocations goes through it.

    `checked`: `lost` tells whether numbers that were handed on overflow or vanish; each is looked at, which takes time.
    """

    def __init__(self, activations: Activations, checked: bool = False) -> None:
        self.activations, self.checked = activations, checked
        self.recent: dict[BufferKind, list[torch.Tensor]] = defaultdict(list)  # the last written first
        self.filled: set[int] = set()  # addresses of what was written by a Call that reads nothing: as in the engine
        self.lost = False

    def run(self, part: Part) -> None:
        """One invocation of `part`."""
        given = self._assigned(part)
        assert part.decided is not None
        returned = part.call_on(with_buffers(part.decided, part.target, part.next(), given))
        read, only_written = read_and_written(part)
        fills = not read and not part.moved
        for key in [*reversed([key for key in read if key in part.restored]), *only_written]:
            self._written(part.places[key][:3], given[key], fills)
        for output in reversed([*float_outputs(returned)]):
            storage = output.untyped_storage()
            dtype = str(output.dtype).removeprefix("torch.")
            self._written(buffer_kind(str(output.device), dtype, storage.nbytes()), storage_bytes(output), fills)

    def _assigned(self, part: Part) -> dict[StorageKey, torch.Tensor]:
        """The buffer of each activation of `part`."""
        assert part.decided is not None
        sizes = reached_bytes(part.decided.bound, part.target.device, part.target.home)
        read, only_written = read_and_written(part)
        given: dict[StorageKey, torch.Tensor] = {}
        for key in [*read, *only_written]:
            kind = part.places[key][:3]
            taken = {buffer.data_ptr() for buffer in given.values()}
            last = [one for one in self.recent[kind] if len(one) >= sizes[key] and one.data_ptr() not in taken]
            if last and key in read:
                given[key] = last[0]
                self._look(last[0][: sizes[key]], kind)
            else:
                given[key] = self._other(kind, taken)
        return given

    def _other(self, kind: BufferKind, taken: set[int]) -> torch.Tensor:
        """A buffer that this invocation does not have, the one that was not written for longest."""
        order = {one.data_ptr(): age for age, one in enumerate(self.recent[kind])}
        free = (one for one in self.activations.all_of(kind) if one.data_ptr() not in taken)
        return max(free, key=lambda one: order.get(one.data_ptr(), RECENT_BUFFERS))

    def _look(self, read: torch.Tensor, kind: BufferKind) -> None:
        if self.checked and not self.lost and read.data_ptr() not in self.filled:
            self.lost = has_lost_numbers(read, kind)

    def _written(self, kind: BufferKind, buffer: torch.Tensor, fills: bool) -> None:
        (self.filled.add if fills else self.filled.discard)(buffer.data_ptr())
        others = [one for one in self.recent[kind] if one.data_ptr() != buffer.data_ptr()]
        self.recent[kind] = [buffer, *others][:RECENT_BUFFERS]


def loses_numbers(order: Iterable[int], parts: Parts) -> bool:
    """Whether numbers overflow or vanish in runs of `order` (Calls), of those that can run."""
    steps = [parts.good[call] for call in order if call in parts.good]
    for _ in range(CHECKED_RUNS):
        flow = Flow(parts.activations, checked=True)
        for part in steps:
            flow.run(part)
        if flow.lost:
            return True
    return False


def read_and_written(part: Part) -> tuple[list[StorageKey], list[StorageKey]]:
    """The activations that `part` reads, and those that it only writes, in the order of its arguments."""
    assert part.decided is not None
    names: dict[StorageKey, list[str]] = {}
    for path, spec in part.decided.bound.tensors():
        names.setdefault(storage_key(spec, part.target), []).append(plain_name(part.decided.bound.holder(path).name))
    unread = cost.unread_inputs(part.call.operator) if part.call.namespace == "aten" else frozenset[str]()
    only = {key for key, all_of in names.items() if all(n in unread or ONLY_WRITTEN.fullmatch(n) for n in all_of)}
    keys = [key for key in names if key in part.places]
    return [key for key in keys if key not in only], [key for key in keys if key in only]


def float_outputs(returned: Any) -> Iterator[torch.Tensor]:
    """The tensors of floats in what an operator returned."""
    for one in tree_leaves(returned):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.untyped_storage().nbytes():
            yield one


def storage_bytes(output: torch.Tensor) -> torch.Tensor:
    """The whole storage of `output`."""
    size = output.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage(), 0, (size,), (1,))


def has_lost_numbers(read: torch.Tensor, kind: BufferKind) -> bool:
    """Whether numbers (bytes of the dtype in `kind`) are nan, huge or all nothing; the first of them are looked at."""
    if kind[1] not in CHECKED_DTYPES:
        return False
    dtype = getattr(torch, kind[1])
    cells = read[: min(len(read), CHECKED_BYTES) // dtype.itemsize * dtype.itemsize].view(dtype).float().abs()
    usual = cells <= LARGEST
    return cells.numel() > 0 and bool((~usual).float().mean() > MOST_LOST_SHARE or cells[usual].amax() < SMALLEST)

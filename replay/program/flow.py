"""What one Call of a Program writes, the next one reads from the same memory, and so from the caches, as in the engine.

A Recording has no addresses. But Calls are in order, and what was written last is usually read first. So, of each kind
of buffer (kcap.replay.program.prepared), the first argument that is read gets the one written last, the second the one
written before it; what is only written gets a buffer that is not read. What an operator returns is written, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kcap.replay.group.peers import Alone
from kcap.replay.program.prepared import (
    Activations,
    BufferKind,
    PreparedCall,
    PreparedCalls,
    ProgramSnapshot,
    buffer_kind,
)
from kcap.replay.rebuild.memory import reached_bytes, storage_key
from kcap.replay.rebuild.persistent import plain_name
from kcap.replay.rebuild.rebuild import with_buffers
from kcap.replay.roofline.sweeps import unread_inputs
from kcap.schemas.derive.bound_call import StorageKey

RECENT_BUFFERS = 4  # of each kind, so many are remembered in the order of their writes
ONLY_WRITTEN = re.compile(r"((norm|residual|quant|scale)_)?out(put)?s?\d*|out_ptr\d+|result|dst|c|o")
CHECKED_DTYPES = ("bfloat16", "float16", "float32", "float64")
SMALLEST, LARGEST = 1e-20, 1e6  # absolute values as engines have them
MAX_LOST_SHARE, CHECKED_BYTES = 0.01, 1 << 20
CHECKED_RUNS = 2  # a run begins with what the one before has left
NOT_HANDED_ON = "handed on, numbers overflow or vanish: no kernel reads what these write: "


class Flow:
    """One run of a Program, whose invocations pass on their activations through it.

    `checked`: look at all numbers that are passed on; `loser` is the first Call that wrote some which overflow or
    vanish. This takes time.
    """

    def __init__(self, activations: Activations, checked: bool = False) -> None:
        self.activations, self.checked = activations, checked
        self.recent: dict[BufferKind, list[torch.Tensor]] = defaultdict(list)  # the last written first
        self.writers: dict[int, int] = {}  # of addresses; not of those that a Call fills as in the engine
        self.loser: int | None = None

    def run(self, part: PreparedCall) -> None:
        """One invocation of `part`."""
        buffers = self._assigned(part)
        assert part.resolved is not None
        returned = part.call_on(with_buffers(part.resolved, part.target, part.next(), buffers))
        if part.apart:
            return
        read, only_written = read_and_written(part)
        writer = part.call.id if read or part.persistent else None
        for key in [*reversed([key for key in read if key in part.restored]), *only_written]:
            self._written(part.slots[key][:3], buffers[key], writer)
        for output in reversed([*float_outputs(returned)]):
            storage = output.untyped_storage()
            dtype = str(output.dtype).removeprefix("torch.")
            self._written(buffer_kind(str(output.device), dtype, storage.nbytes()), storage_bytes(output), writer)

    def _assigned(self, part: PreparedCall) -> dict[StorageKey, torch.Tensor]:
        """The buffer of each activation of `part`."""
        assert part.resolved is not None
        sizes = reached_bytes(part.resolved.bound, part.target.device, part.target.home)
        read, only_written = read_and_written(part)
        assigned: dict[StorageKey, torch.Tensor] = {}
        for key in [*read, *only_written]:
            kind = part.slots[key][:3]
            addresses = {buffer.data_ptr() for buffer in assigned.values()}
            candidates = [
                buffer
                for buffer in self.recent[kind]
                if len(buffer) >= sizes[key] and buffer.data_ptr() not in addresses
            ]
            if candidates and key in read:
                assigned[key] = candidates[0]
                self._check(candidates[0][: sizes[key]], kind)
            else:
                assigned[key] = self._oldest_unused(kind, addresses)
        return assigned

    def _oldest_unused(self, kind: BufferKind, addresses: set[int]) -> torch.Tensor:
        """Of the buffers that this invocation does not use, the one whose last write is longest ago."""
        order = {buffer.data_ptr(): age for age, buffer in enumerate(self.recent[kind])}
        unused = (buffer for buffer in self.activations.all_of(kind) if buffer.data_ptr() not in addresses)
        return max(unused, key=lambda buffer: order.get(buffer.data_ptr(), RECENT_BUFFERS))

    def _check(self, read: torch.Tensor, kind: BufferKind) -> None:
        writer = self.writers.get(read.data_ptr())
        if self.checked and self.loser is None and writer is not None and has_lost_numbers(read, kind):
            self.loser = writer

    def _written(self, kind: BufferKind, buffer: torch.Tensor, writer: int | None) -> None:
        self.writers.pop(buffer.data_ptr(), None)
        if writer is not None:
            self.writers[buffer.data_ptr()] = writer
        older = [other for other in self.recent[kind] if other.data_ptr() != buffer.data_ptr()]
        self.recent[kind] = [buffer, *older][:RECENT_BUFFERS]


def part_losers(order: Iterable[int], parts: PreparedCalls, peers: Alone) -> tuple[ProgramSnapshot, list[str]]:
    """Set the Calls apart by which numbers overflow or vanish in runs of `order`, in any rank, one after another.

    Returns what restores all that the Calls write to, and a note on those set apart. Of `order`, what can run does.
    """
    steps = [parts.good[call] for call in order if call in parts.good]
    restore = ProgramSnapshot(parts.good.values())
    while peers.any((loser := first_loser(steps, parts, peers)) is not None):
        restore()
        if loser is not None:
            set_apart(parts.good[loser])
        del restore  # there may be no room for both
        restore = ProgramSnapshot(parts.good.values())
    apart = sorted({part.call.operator.split(".")[0] for part in steps if part.apart})
    return restore, restore.notes + ([NOT_HANDED_ON + ", ".join(apart)] if apart else [])


def set_apart(part: PreparedCall) -> None:
    """Give `part` buffers of its own for what it writes, with what the shared ones hold now; nobody else reads them."""
    assert part.resolved is not None
    read, only_written = read_and_written(part)
    written = {key for key in read if key in part.restored} | {*only_written}
    own = {key: part.sets[0].buffers[key].clone() for key in written}
    sets = [(inputs, with_buffers(part.resolved, part.target, inputs, own)) for inputs in part.sets]
    part.sets = [replace(separate, keep=inputs.keep) for inputs, separate in sets]
    part.slots = {key: slot for key, slot in part.slots.items() if key not in own}
    part.apart = True


def first_loser(steps: Sequence[PreparedCall], parts: PreparedCalls, peers: Alone) -> int | None:
    """The first Call in runs of `steps` that wrote, and handed on, numbers that overflow or vanish."""
    for _ in range(CHECKED_RUNS):
        flow = Flow(parts.activations, checked=True)
        for part in steps:
            flow.run(part)
        if peers.any(flow.loser is not None):
            return flow.loser
    return None


def read_and_written(part: PreparedCall) -> tuple[list[StorageKey], list[StorageKey]]:
    """The activations that `part` reads, and those that it only writes, in the order of its arguments."""
    assert part.resolved is not None
    names: dict[StorageKey, list[str]] = {}
    for path, spec in part.resolved.bound.tensors():
        names.setdefault(storage_key(spec, part.target), []).append(plain_name(part.resolved.bound.holder(path).name))
    unread = unread_inputs(part.call.operator) if part.call.namespace == "aten" else frozenset[str]()
    added_to = {plain_name(name) for name in part.resolved.rule.added_to}
    only_written = {
        key
        for key, all_names in names.items()
        if all(n in unread or (ONLY_WRITTEN.fullmatch(n) and n not in added_to) for n in all_names)
    }
    keys = [key for key in names if key in part.slots]
    return [key for key in keys if key not in only_written], [key for key in keys if key in only_written]


def float_outputs(returned: Any) -> Iterator[torch.Tensor]:
    """The tensors of floats among an operator's results."""
    for leaf in tree_leaves(returned):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.untyped_storage().nbytes():
            yield leaf


def storage_bytes(output: torch.Tensor) -> torch.Tensor:
    """The whole storage of `output`."""
    size = output.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage(), 0, (size,), (1,))


def has_lost_numbers(buffer: torch.Tensor, kind: BufferKind) -> bool:
    """Whether numbers (as bytes; `kind` has their dtype) are nan, huge or all zero, by the first of them."""
    if kind[1] not in CHECKED_DTYPES:
        return False
    dtype = getattr(torch, kind[1])
    cells = buffer[: min(len(buffer), CHECKED_BYTES) // dtype.itemsize * dtype.itemsize].view(dtype).float().abs()
    normal = cells <= LARGEST
    return cells.numel() > 0 and bool((~normal).float().mean() > MAX_LOST_SHARE or cells[normal].amax() < SMALLEST)

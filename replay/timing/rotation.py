"""Sets of inputs used in turn, so that the caches hold of them what they would hold in the engine.

A set of inputs is cold if five times the L2 was touched since its last use: by the other sets, or because a graph uses
each set once, and between two replays, outside the clock's window, a sweep reads as much. (It writes nothing, so no
line has to be written back while the clock runs.)

The time of a small kernel also depends on where its few lines are, near or far in the L2: the same kernel took 3.06 µs
in one process on an H200 and 3.27 µs in the next, each repeatably. So inputs that need not be cold have several copies
too, all of which the L2 holds at once. And inputs that are cold by their size alone have more sets than they need: over
8 sets, FlashAttention's 56 µs for 4,096 tokens differed by 1 % between two layouts of the same sets, over 24 by 0.3 %.

Storages that a call writes to are restored, so that each sample finds what the first one found.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from kcap.schemas.derive.bound_call import Inputs, StorageKey
from kcap.schemas.results.measurement import Cache

COLD_FACTOR = 5  # times the last-level cache: what has to be touched until a set of inputs is cold again
RESIDENT_SHARE = 0.25  # of the L2 stays from one use to the next: what both halves of an H200's read, both hold
MAX_COPIES, MAX_COPIES_BYTES = 64, 512 << 20  # of inputs or results that stay in the L2, and of all copies together
MAX_ROTATING_BYTES = 16 << 30  # seven sets of 512 experts, of which a token touches less than the L2 holds
MAX_RESULT_BYTES = 8 << 30
TYPICAL_REPLAY_US = 1000.0  # that one graph replay lasts at least, where nothing limits it
MIN_REPLAY_US = 100.0  # that it lasts at least where memory has no room for more sets
MIN_INVOCATIONS = 24  # in a graph, and sets of what is cold by its size alone,
MAX_REPLAY_US = 6000.0  # unless so many would last longer than this
MAX_SAVED_BYTES = 64 << 20  # of one set of inputs; what is larger is not restored

CloneInputs: TypeAlias = Callable[[], Inputs]


@dataclass(frozen=True)
class SetSize:
    """The bytes of one set of inputs, and those of them that one invocation can touch."""

    total: int
    touched: int


@dataclass(frozen=True)
class Rotation:
    """The cache state to time in. `clone` makes another set, of which `size` is at new addresses.

    `cold`: the L2 must not hold a set when it is used. Otherwise there are several copies, so that the time is a mean
    over their addresses.
    """

    cache: Cache
    size: SetSize
    cold: bool
    clone: CloneInputs

    @classmethod
    def of(
        cls,
        cache: Cache,
        all_inputs: SetSize,
        persistent: SetSize,
        clone: CloneInputs,
        clone_persistent: CloneInputs,
        device: str,
    ) -> Rotation:
        """The Rotation of inputs in the state `cache`; `persistent`: the size of the parameters and caches in them.

        `clone` copies all inputs, `clone_persistent` only those. In `serving` activations do not rotate, unless they
        take more of the L2 than stays in it.
        """
        if cache != "serving":
            return cls(cache, all_inputs, cache == "cold", clone)
        if all_inputs.touched - persistent.total > l2_resident_bytes(device):
            return cls(cache, all_inputs, True, clone)
        if persistent.total:
            return cls(cache, persistent, True, clone_persistent)
        return cls(cache, all_inputs, False, clone)

    def set_count(self, estimate_us: float, returned: int, free_bytes: int, device: str) -> int:
        """How many sets the state needs; one if memory has no room for enough.

        `estimate_us`: of one invocation, which returns `returned` bytes of its own.
        """
        limit = graph_length(estimate_us, 1)
        affordable = min(MAX_ROTATING_BYTES, free_bytes // 4) // max(self.size.total, 1)
        if not self.size.touched:
            return 1
        if not self.cold:
            resident = min(
                int(l2_resident_bytes(device) / (self.size.touched + returned)), MAX_COPIES_BYTES // self.size.total
            )
            return max(min(MAX_COPIES, limit, affordable, resident), 1)
        needed = min(cold_sets(self.size.touched, device), limit)
        if needed <= affordable:
            return min(max(rounded_up(needed), min(MIN_INVOCATIONS, limit)), affordable)
        return affordable if affordable * estimate_us >= MIN_REPLAY_US else 1

    def invocations(self, estimate_us: float, sets: int, device: str) -> int:
        """The invocations in a graph over so many sets: each set once, if only the sweep before it makes them cold."""
        length = graph_length(estimate_us, sets)
        return min(length, sets) if self.cold and 1 < sets < cold_sets(self.size.touched, device) else length

    def cache_state(self, sets: int, n: int, device: str) -> Cache:
        """The state that a sample of `n` invocations over so many sets is really in."""
        if not self.cold:
            return self.cache
        swept = self.size.touched and sets >= n
        return self.cache if swept or sets >= cold_sets(self.size.touched, device) else "warm"

    def results_kept(self, size: int, sets: int, free_bytes: int, device: str) -> int:
        """How many results of `size` bytes are kept alive, each at its own address, over so many `sets`."""
        resident = int(l2_resident_bytes(device) / max(size, 1))
        count = min(sets, MAX_COPIES, resident) if resident or self.cache == "warm" else sets
        return max(min(count, min(MAX_RESULT_BYTES, free_bytes // 4) // max(size, 1)), 1)

    @property
    def rotating(self) -> int:
        """The bytes of a set that the L2 does not hold when the set is used."""
        return self.size.total if self.cold else 0


def l2_resident_bytes(device: str) -> float:
    """The bytes that stay in the cache of `device` from one use to the next; on a CPU all."""
    return l2_bytes(device) * RESIDENT_SHARE if device.startswith("cuda") else math.inf


def cold_sets(touched: int, device: str) -> int:
    """How many sets, of which an invocation touches so many bytes each, are cold by their size alone."""
    return -(-COLD_FACTOR * l2_bytes(device) // max(touched, 1))


def graph_length(estimate_us: float, sets: int) -> int:
    """The invocations in a graph that uses each of its sets equally often.

    They last about a millisecond, but are at least MIN_INVOCATIONS where these last no longer than MAX_REPLAY_US.
    """
    fewest = min(MIN_INVOCATIONS, rounded_down(max(invocations_within(MAX_REPLAY_US, estimate_us), 1)))
    length = max(invocations_in_a_replay(estimate_us), fewest)
    return max(round(length / sets), 1) * sets


def invocations_in_a_replay(estimate_us: float) -> int:
    """The invocations that last 1 to 1.5 ms; at least one."""
    return rounded_up(invocations_within(TYPICAL_REPLAY_US, estimate_us) + 1)


def invocations_within(span_us: float, estimate_us: float) -> int:
    """The invocations that fit into a span of time; each counts as half a microsecond at least."""
    return int(span_us / max(estimate_us, 0.5))


def rounded_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16…, for a graph's length affects its time, and estimates differ a little."""
    power = 1 << (number - 1).bit_length()
    between = power * 3 // 4
    return between if number <= between else power


def rounded_down(number: int) -> int:
    """The previous of these numbers."""
    power = 1 << (number.bit_length() - 1)
    between = power * 3 // 2
    return between if number >= between else power


@cache
def l2_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@cache
def sweeper(device: str) -> Callable[[], None]:
    """A function that reads five times the L2 on the current stream."""
    cells = torch.zeros(COLD_FACTOR * l2_bytes(device) // 4, device=device)
    result = torch.zeros((), device=device)

    def sweep() -> None:
        torch.amax(cells, 0, out=result)

    return sweep


class RoundRobin:
    """Called, it runs `call` once, each time on the next of `sets`.

    It keeps the last `kept` results alive (at least one), and drops the oldest before the next is made.
    """

    def __init__(self, call: Callable[..., Any], sets: Sequence[Inputs], kept: int = 1) -> None:
        self._call, self._sets, self._next = call, sets, cycle(sets)
        self._kept = kept
        self._results: deque[Any] = deque()

    def __call__(self) -> None:
        inputs = next(self._next)
        if len(self._results) == self._kept:
            self._results.popleft()
        self._results.append(self._call(*inputs.args, **inputs.kwargs))

    def result_bytes(self) -> int:
        """The bytes of the last result, without storages of the inputs."""
        own = {buffer.untyped_storage().data_ptr() for inputs in self._sets for buffer in inputs.buffers.values()}
        leaves = tree_leaves(list(self._results)[-1:])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
        sizes = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tensors}
        return sum(size for address, size in sizes.items() if address not in own)

    def drop_results(self) -> None:
        """Keep no result alive."""
        self._results.clear()


@dataclass(frozen=True)
class InputSnapshot:
    """The content of the storages that a call writes to; empty where they are too large."""

    content: dict[StorageKey, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs, keys: Iterable[StorageKey]) -> InputSnapshot:
        """The current content of the storages `keys` of `inputs`."""
        buffers = {key: inputs.buffers[key] for key in keys}
        if sum(len(buffer) for buffer in buffers.values()) > MAX_SAVED_BYTES:
            return cls({})
        return cls({key: buffer.clone() for key, buffer in buffers.items()})

    def restore(self, sets: Iterable[Inputs]) -> None:
        """Write the content back into every set; once into a storage that several sets share."""
        restored: set[int] = set()
        for inputs in sets:
            for key, content in self.content.items():
                buffer = inputs.buffers[key]
                if id(buffer) not in restored:
                    restored.add(id(buffer))
                    buffer.copy_(content)


def reset_l2_persistence() -> bool:
    """Make every persisting line of the current context's L2 an ordinary one; False where the runtime cannot."""
    library = cuda_runtime()
    try:
        return library is not None and library.cudaCtxResetPersistingL2Cache() == 0
    except AttributeError:  # a runtime older than 11.0
        return False


@cache
def cuda_runtime(maps: Path = Path("/proc/self/maps")) -> Any:
    """The CUDA runtime that torch loaded into this process; None if there is none."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libcudart" in line)
    for path in dict.fromkeys(paths):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None

"""How inputs go round, so that the caches hold of them what they would hold in the engine.

A set of inputs is cold where five times the L2 was touched since its last use: by the other sets, or because each is
used once a replay and a sweep between two replays, outside the clock's window, reads as much (it writes nothing, so no
line has to be written back while the clock runs).

How long a small kernel takes goes by where its few lines lie, too, near or far in the L2: the same one took 3.06 µs in
one process on an H200 and 3.27 µs in the next, each time after time. So also what need not be cold lies at several
places, all of which the L2 holds at once. And what is cold by its size alone has more sets than it needs: over eight,
FlashAttention's 56 µs for 4,096 tokens differed by 1 % between two layouts of the same sets, over 24 by 0.3 %.

What a call writes to is put back to what it held: in each sample it finds what it found in the first.
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

COLD_FACTOR = 5


SHARE_THAT_STAYS = 0.25  # of the L2: what both of an H200's halves read, both hold


MOST_PLACES = 64  # of what stays


PLACES_BYTES = 512 << 20  # of all of them


MOST_ROTATING_BYTES = 8 << 30


LEAST_REPLAY_US = 1000.0  # about the least that one graph replay lasts


SHORTEST_REPLAY_US = 100.0  # and where memory has no room for more sets


FEWEST_TURNS = 24  # invocations in a graph, and sets of what is cold by its size alone


LONGEST_REPLAY_US = 6000.0  # but fewer where so many would last longer


CloneInputs: TypeAlias = Callable[[], Inputs]


@dataclass(frozen=True)
class SetSize:
    """Bytes of one set of inputs, and of these what one invocation can reach."""

    total: int
    touched: int


@dataclass(frozen=True)
class Rotation:
    """The cache state wanted; the `size` of what `clone` makes anew. `cold`: the L2 must not hold it when it is used.

    What is not cold lies at several places, so that its time is a mean over them.
    """

    cache: Cache
    size: SetSize
    cold: bool
    clone: CloneInputs

    @classmethod
    def of(
        cls, cache: Cache, whole: SetSize, kept: SetSize, clone: CloneInputs, clone_kept: CloneInputs, device: str
    ) -> Rotation:
        """What goes round in the state `cache` of inputs of the size `whole`, parameters and caches in them `kept`.

        `clone` makes all of them anew, `clone_kept` only these. In `serving` activations stay, unless they take more of
        the L2 than stays in it. Where nothing rotates, all lies at several places.
        """
        if cache != "serving":
            return cls(cache, whole, cache == "cold", clone)
        if whole.touched - kept.total > staying_bytes(device):
            return cls(cache, whole, True, clone)
        if kept.total:
            return cls(cache, kept, True, clone_kept)
        return cls(cache, whole, False, clone)

    def sets(self, estimate_us: float, returned: int, free_bytes: int, device: str) -> int:
        """How many sets the state needs of a call that takes so long and returns so many bytes of its own; one, if not
        enough can be had."""
        most = nodes(estimate_us, 1)
        affordable = min(MOST_ROTATING_BYTES, free_bytes // 4) // max(self.size.total, 1)
        if not self.size.touched:
            return 1
        if not self.cold:
            held = min(int(staying_bytes(device) / (self.size.touched + returned)), PLACES_BYTES // self.size.total)
            return max(min(MOST_PLACES, most, affordable, held), 1)
        needed = min(cold_sets(self.size.touched, device), most)
        if needed <= affordable:
            return min(max(rounded_up(needed), min(FEWEST_TURNS, most)), affordable)
        return affordable if affordable * estimate_us >= SHORTEST_REPLAY_US else 1

    def invocations(self, estimate_us: float, sets: int, device: str) -> int:
        """How many a graph over so many sets has: each set once, where only the sweep before it makes them cold."""
        wanted = nodes(estimate_us, sets)
        return min(wanted, sets) if self.cold and 1 < sets < cold_sets(self.size.touched, device) else wanted

    def reached(self, sets: int, n: int, device: str) -> Cache:
        """The state that `n` invocations a sample over so many sets are in."""
        if not self.cold:
            return self.cache
        swept = self.size.touched and sets >= n
        return self.cache if swept or sets >= cold_sets(self.size.touched, device) else "warm"

    def result_places(self, size: int, sets: int, free_bytes: int, device: str) -> int:
        """At how many places the results lie, `size` bytes each, of invocations that go round over so many `sets`."""
        held = int(staying_bytes(device) / max(size, 1))
        wanted = min(sets, MOST_PLACES, held) if held or self.cache == "warm" else sets
        return max(min(wanted, min(MOST_ROTATING_BYTES, free_bytes // 4) // max(size, 1)), 1)

    @property
    def rotating(self) -> int:
        """Bytes of a set that the L2 does not hold when it is used."""
        return self.size.total if self.cold else 0


def staying_bytes(device: str) -> float:
    """Bytes that stay in the cache of `device` from one use to the next; on a CPU everything."""
    return l2_bytes(device) * SHARE_THAT_STAYS if device.startswith("cuda") else math.inf


def cold_sets(touched: int, device: str) -> int:
    """Sets of so many bytes that are cold by their size: together five times the L2."""
    return -(-COLD_FACTOR * l2_bytes(device) // max(touched, 1))


def nodes(estimate_us: float, sets: int) -> int:
    """Invocations in a graph that uses each of its sets equally often: about a millisecond of them, or `FEWEST_TURNS`
    if they last no longer than `LONGEST_US`."""
    few = min(FEWEST_TURNS, rounded_down(max(invocations_within(LONGEST_REPLAY_US, estimate_us), 1)))
    wanted = max(invocations_in_a_replay(estimate_us), few)
    return max(round(wanted / sets), 1) * sets


def invocations_in_a_replay(estimate_us: float) -> int:
    """Invocations that last a millisecond to one and a half, or one."""
    return rounded_up(invocations_within(LEAST_REPLAY_US, estimate_us) + 1)


def invocations_within(span_us: float, estimate_us: float) -> int:
    """Whole invocations in a span of time; none is taken to be shorter than half a microsecond."""
    return int(span_us / max(estimate_us, 0.5))


def rounded_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16…: a graph's length is part of its time, and estimates differ a little."""
    power = 1 << (number - 1).bit_length()
    between = power * 3 // 4
    return between if number <= between else power


def rounded_down(number: int) -> int:
    """The last of them."""
    power = 1 << (number.bit_length() - 1)
    between = power * 3 // 2
    return between if number >= between else power


@cache
def l2_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@cache
def sweeper(device: str) -> Callable[[], None]:
    """What reads five times the L2 on the current stream."""
    cells = torch.zeros(COLD_FACTOR * l2_bytes(device) // 4, device=device)
    result = torch.zeros((), device=device)

    def sweep() -> None:
        torch.amax(cells, 0, out=result)

    return sweep


class RoundRobin:
    """Called, it runs `call` once, each time on the next of `sets`. What it returns lies at `places`, at least one, in
    turns: so many results are kept, and the oldest is let go before the next is made."""

    def __init__(self, call: Callable[..., Any], sets: Sequence[Inputs], places: int = 1) -> None:
        self._call, self._sets, self._next = call, sets, cycle(sets)
        self._places = places
        self._results: deque[Any] = deque()

    def __call__(self) -> None:
        inputs = next(self._next)
        if len(self._results) == self._places:
            self._results.popleft()
        self._results.append(self._call(*inputs.args, **inputs.kwargs))

    def result_bytes(self) -> int:
        """Of what the last invocation returned, its inputs not counted."""
        own = {buffer.untyped_storage().data_ptr() for inputs in self._sets for buffer in inputs.buffers.values()}
        leaves = tree_leaves(list(self._results)[-1:])
        tensors = [one for one in leaves if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        return sum(size for place, size in found.items() if place not in own)

    def let_go(self) -> None:
        """Keep no result."""
        self._results.clear()


MOST_SAVED_BYTES = 64 << 20  # of one set; what is larger is not restored


@dataclass(frozen=True)
class SavedStorages:
    """The content of the storages that a call writes to; none where they are too large."""

    content: dict[StorageKey, torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs, keys: Iterable[StorageKey]) -> SavedStorages:
        """The storages `keys` of `inputs` as they are now."""
        found = {key: inputs.buffers[key] for key in keys}
        if sum(len(buffer) for buffer in found.values()) > MOST_SAVED_BYTES:
            return cls({})
        return cls({key: buffer.clone() for key, buffer in found.items()})

    def restore(self, sets: Iterable[Inputs]) -> None:
        """Write it back into every set; a storage that several sets share once."""
        done: set[int] = set()
        for inputs in sets:
            for key, content in self.content.items():
                buffer = inputs.buffers[key]
                if id(buffer) not in done:
                    done.add(id(buffer))
                    buffer.copy_(content)


def reset_persisting_lines() -> bool:
    """Make every persisting line of the current context's L2 an ordinary one; whether the runtime could be asked."""
    library = cuda_runtime()
    try:
        return library is not None and library.cudaCtxResetPersistingL2Cache() == 0
    except AttributeError:  # a runtime older than 11.0
        return False


@cache
def cuda_runtime(maps: Path = Path("/proc/self/maps")) -> Any:
    """The CUDA runtime that torch loaded into this process; None where there is none."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libcudart" in line)
    for path in dict.fromkeys(paths):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None

"""How inputs go round, so that the caches hold of them what they would hold in the engine.

A set of inputs is cold where five times the L2 was touched since its last use: by the other sets, or because each is
used once a replay and a sweep between two replays, outside the clock's window, reads as much (it writes nothing, so no
line has to be written back while the clock runs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from kcap.replay.inputs import Inputs
from kcap.schemas.measurement import Cache

COLD_FACTOR = 5
MOST_SETS = 4000
MOST_BYTES = 8 << 30
REPLAY_US = 1000.0  # the least that one graph replay lasts
SHORTEST_US = 100.0  # and where memory has no room for more sets
MOST_NODES = 4000  # invocations in one graph


@dataclass(frozen=True)
class Size:
    """Bytes of one set of inputs, and of these what one invocation can reach."""

    total: int
    touched: int


@dataclass(frozen=True)
class Rotation:
    """The cache state wanted; the `size` of what `clone` makes anew, in serving the parameters and caches alone."""

    cache: Cache
    size: Size
    clone: Callable[[], Inputs]

    def sets(self, estimate_us: float, free_bytes: int, device: str) -> int:
        """How many sets the state needs of a call that takes so long; one, if not enough can be had."""
        if self.cache == "warm" or not self.size.touched:
            return 1
        wanted = min(-(-COLD_FACTOR * l2_bytes(device) // self.size.touched), nodes(estimate_us, 1))
        affordable = min(MOST_SETS, min(MOST_BYTES, free_bytes // 4) // max(self.size.total, 1))
        if wanted <= affordable:
            return wanted
        return affordable if affordable * estimate_us >= SHORTEST_US else 1

    def reached(self, sets: int, n: int, device: str) -> Cache:
        """The state that `n` invocations a sample over so many sets are in."""
        if self.cache == "serving" and not self.size.touched:
            return "serving"
        cold = sets * self.size.touched >= COLD_FACTOR * l2_bytes(device) or (self.size.touched and sets >= n)
        return self.cache if cold else "warm"


def nodes(estimate_us: float, sets: int, limit: int = MOST_NODES) -> int:
    """Invocations in a graph that lasts a millisecond and uses every set equally often."""
    wanted = min(int(REPLAY_US / max(estimate_us, 0.5)) + 1, limit)
    return -(-wanted // sets) * sets


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

"""The time that a kernel cannot go below on a machine: what it must move, or compute, at the machine's ceilings.

A floor is rather too low than too high. Ceilings are measured, so that a better kernel than those that measured them
may beat them: MARGINS says by how much. Of a working set half may stay in a nearer cache. What is written may stay in
the cache even where inputs rotate (`cold`, `serving`), for the outputs of all invocations can lie in one place.
"""

from __future__ import annotations

from kcap.replay.roofline.ceilings import Ceilings
from kcap.schemas.families.cost import Cost
from kcap.schemas.measurement import Cache

# By the kind of device: of bandwidth and of arithmetic. Sustained products of random matrices lower a GPU's clock by a
# tenth or two, short ones do not; on a CPU torch's own loops are further from what a core can do.
MARGINS = {"cuda": (1.15, 1.25), "cpu": (1.5, 1.5)}
COLD_FACTOR = 5  # times the last-level cache: what `cold` inputs rotate over at least


def floor_us(
    cost: Cost, ceilings: Ceilings, cache: Cache = "warm", sets: int | None = None, fresh: int | None = None
) -> float:
    """Microseconds of one invocation, at least; 0 where nothing is known of its cost.

    `cache`: where its inputs lie. Unless that is `warm`, `fresh` bytes of them rotate (None: in `cold` all that is
    read; in `serving` nobody knows, and so none), over so many `sets` (None: as many as the state promises).
    """
    of_bytes, of_flops = MARGINS["cuda" if ceilings.device.startswith("cuda") else "cpu"]
    if fresh is None:
        fresh = cost.read if cache == "cold" else 0
    moving = max(_warm(cost, ceilings), 0.0 if cache == "warm" else _rotating(fresh, ceilings, sets))
    return max(moving / of_bytes, _computing(cost, ceilings) / of_flops)


def _warm(cost: Cost, ceilings: Ceilings) -> float:
    """What is written may be what was read, in place: the working set is half of the bytes at least."""
    return cost.bytes / ceilings.bandwidth(cost.bytes / 2) / 1e3


def _rotating(fresh: int, ceilings: Ceilings, sets: int | None) -> float:
    over = max(COLD_FACTOR * ceilings.cache_bytes, fresh) if sets is None else sets * fresh
    return fresh / ceilings.bandwidth(over) / 1e3


def _computing(cost: Cost, ceilings: Ceilings) -> float:
    peak = ceilings.peak(cost.dtype)
    return cost.flops / peak / 1e6 if peak else 0.0

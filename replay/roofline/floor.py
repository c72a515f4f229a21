"""The time that a kernel cannot go below on a machine: what it must move, or compute, at the machine's ceilings.

A floor is never too high on purpose. Ceilings are measured, so that a better kernel than those that measured them may
beat them: MARGINS says by how much. Of a working set half may stay in a nearer cache; of what rotates (`cold`), what
is written may stay in the cache, for the outputs of invocations can lie in one place.
"""

from __future__ import annotations

from kcap.replay.roofline.ceilings import Ceilings
from kcap.schemas.families.cost import Cost
from kcap.schemas.measurement import Cache

# By the kind of device: of bandwidth and of arithmetic. Sustained products of random matrices lower a GPU's clock by a
# tenth or two, short ones do not; on a CPU torch's own loops are further from what a core can do.
MARGINS = {"cuda": (1.15, 1.25), "cpu": (1.5, 1.5)}
COLD_FACTOR = 5  # times the last-level cache: what `cold` inputs rotate over at least


def floor_us(cost: Cost, ceilings: Ceilings, cache: Cache | str = "warm", sets: int | None = None) -> float:
    """Microseconds of one invocation, at least; 0 where nothing is known of its cost.

    `cache`: where its inputs lie; anything but `cold` counts as `warm`. `sets`: how many sets of inputs rotate where
    they are `cold` (None: as many as `cold` promises).
    """
    of_bytes, of_flops = MARGINS["cuda" if ceilings.device.startswith("cuda") else "cpu"]
    return max(_moving(cost, ceilings, cache, sets) / of_bytes, _computing(cost, ceilings) / of_flops)


def _moving(cost: Cost, ceilings: Ceilings, cache: str, sets: int | None) -> float:
    """What is written may be what was read, in place: the working set is half of the bytes at least."""
    warm = cost.bytes / ceilings.bandwidth(cost.bytes / 2)
    if cache != "cold":
        return warm / 1e3
    rotating = max(COLD_FACTOR * ceilings.cache_bytes, cost.read) if sets is None else sets * cost.read
    return max(warm, cost.read / ceilings.bandwidth(rotating)) / 1e3


def _computing(cost: Cost, ceilings: Ceilings) -> float:
    peak = ceilings.peak(cost.dtype)
    return cost.flops / peak / 1e6 if peak else 0.0

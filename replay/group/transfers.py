"""What of a collective's kernel is its transfer, in the engine's profile and in that of a replayed Program.

The kernel lasts from the arrival of its own rank on: the shortest of the ranks' times is that of the rank that came
last, which waited for nobody. But in a step's first collective all ranks may wait, for a link that had nothing to do:
90 to 400 us on two H200s, where the others of the same Call took 4. Such a transfer counts as its Call's median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

FEW = 3  # transfers of a Call, of which one can be told to be unusual
UNUSUAL = 2.0  # times the median


def usual_transfer(shortest: Sequence[float]) -> float:
    """The median of a Call's transfers; infinite where it ran too seldom."""
    return median(shortest) if len(shortest) >= FEW else math.inf


def transfer_of(shortest: float, usual: float) -> float:
    """`shortest`: of the ranks' times of one collective, in the unit of `usual`."""
    return shortest if shortest <= UNUSUAL * usual else usual

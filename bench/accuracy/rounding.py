"""Whether a reference means the same in a higher precision.

Then that is the truth, and what the reference rounds on the way, in the dtype of its inputs, may be rounded or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kcap.bench.accuracy import RTOL, SAME, Choice, difference
from kcap.replay.datasets.inputs import definition_dtype
from kcap.schemas.flashinfer.definition import Definition

MOST_ROUNDING = 8.0  # times what the coarsest dtype allows: what is further off means something else in another dtype
COUNTS_SHARE = 1 / 16  # of the rms of integers that thresholds decide: what rounding may change in them
RTOLS = {name: RTOL[definition_dtype(name)] for name in ("float32", "float16", "bfloat16")}  # of inputs


def rounds_to(
    definition: Definition, own: Sequence[torch.Tensor], higher: Sequence[torch.Tensor], chosen: Mapping[int, Choice]
) -> bool:
    """Whether the reference's outputs in its own precision are those of a higher one but for rounding.

    It may round to the dtype of its inputs on the way: an output of float32 can be as coarse as they are.
    """
    coarsest = max((RTOLS.get(tensor.dtype, 0.0) for tensor in definition.inputs.values()), default=0.0)
    for place, (ours, theirs) in enumerate(zip(own, higher, strict=True)):
        off = difference(ours, theirs, None, chosen.get(place)).error
        if off <= (MOST_ROUNDING * max(coarsest / RTOL[ours.dtype], 1.0) if ours.dtype in RTOL else SAME):
            continue
        if ours.dtype in RTOL or place in chosen or ours.shape != theirs.shape or ours.dtype.is_floating_point:
            return False
        counts = theirs.double()
        if float((ours.double() - counts).norm()) > COUNTS_SHARE * float(counts.norm()):
            return False
    return True

"""Kernels that read all of their inputs: products of matrices (2 FLOPs for each term), norms, activations and such."""

from __future__ import annotations

import math

from kcap.replay.roofline.given import Given
from kcap.replay.roofline.kinds import kind
from kcap.schemas.families.cost import Cost


@kind("gemm", "bmm")
def product(given: Given) -> Cost:
    """The terms of each element of C are counted by the axes that A and B share and C lacks."""
    shapes = {**given.definition.inputs, **given.definition.outputs}
    a, b, c = (shapes[name].shape or [] for name in ("A", "B", "C"))
    summed = [axis for axis in a if axis in b and axis not in c]
    if len(summed) != 1:
        return given.whole()
    return given.whole(2 * math.prod(given.sizes[axis] for axis in [*c, *summed]))


@kind("rmsnorm", "layernorm", "activation", "quantization", "moe_routing", "comm")
def elementwise(given: Given) -> Cost:
    """FLOPs are few, and not counted."""
    return given.whole()

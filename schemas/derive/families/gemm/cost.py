"""Costs of matrix products: all of A and B is read, of grouped products the groups that have rows; two FLOPs for each term."""

from __future__ import annotations

import math

import torch

from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import cost_function


@cost_function("gemm", "bmm")
def gemm_cost(given: CostInputs) -> Cost:
    """The terms of each element of C are counted by the axes that A and B share and C lacks."""
    shapes = {**given.definition.inputs, **given.definition.outputs}
    a, b, c = (shapes[name].shape or [] for name in ("A", "B", "C"))
    summed = [axis for axis in a if axis in b and axis not in c]
    if len(summed) != 1:
        return given.whole()
    return given.whole(2 * math.prod(given.sizes[axis] for axis in [*c, *summed]))


@cost_function("grouped_gemm")
def grouped_gemm_cost(given: CostInputs) -> Cost:
    """A: [M, K] or [G, M, K], B: [G, N, K]."""
    (_, n, k), counts = given["B"].shape, rows_of_groups(given)
    rows, groups = int(counts.sum()), int((counts > 0).sum())
    read = rows * k * given["A"].element_size() + groups * distinct_bytes(given["B"][:1])
    return given.cost(read, 2 * rows * n * k)


def rows_of_groups(given: CostInputs) -> torch.Tensor:
    if "group_ends" in given:
        ends = given.index("group_ends")
        return ends.diff(prepend=ends.new_zeros(1))
    if "masked_m" in given:
        return given.index("masked_m")
    ids = given.index("group_ids")
    return ids[ids >= 0].bincount()

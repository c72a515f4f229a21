"""grouped_gemm: rows of groups, and matrices of groups that have rows."""

from __future__ import annotations

import torch

from kcap.replay.roofline.given import Given
from kcap.replay.roofline.kinds import kind
from kcap.schemas.families.cost import Cost, reach


@kind("grouped_gemm")
def grouped_gemm(given: Given) -> Cost:
    """A: [M, K] or [G, M, K], B: [G, N, K]."""
    (_, n, k), counts = given["B"].shape, rows_of_groups(given)
    rows, groups = int(counts.sum()), int((counts > 0).sum())
    read = rows * k * given["A"].element_size() + groups * reach(given["B"][:1])
    return given.cost(read, 2 * rows * n * k)


def rows_of_groups(given: Given) -> torch.Tensor:
    if "group_ends" in given:
        ends = given.index("group_ends")
        return ends.diff(prepend=ends.new_zeros(1))
    if "masked_m" in given:
        return given.index("masked_m")
    ids = given.index("group_ids")
    return ids[ids >= 0].bincount()

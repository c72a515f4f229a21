"""What rules make for the groups of a grouped product is valid, whatever the sizes."""

from __future__ import annotations

import torch
from definitions import definition, tensor, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.replay.datasets.inputs import make_inputs


def made(name: str, axis: str, rows: int, groups: int, seed: int) -> torch.Tensor:
    inputs = {name: tensor("int32", axis), "A": tensor("float32", "M"), "B": tensor("float32", "G")}
    of = definition(inputs, {"M": None, "G": groups}, op_type="grouped_gemm")
    return make_inputs(of, workload(of, M=rows), None, seed=seed).inputs[0]


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 64), groups=st.integers(1, 9), seed=st.integers(0, 1000))
def test_groups_cover_the_rows(rows: int, groups: int, seed: int) -> None:
    ends = made("group_ends", "G", rows, groups, seed)
    assert ends.dtype == torch.int32 and int(ends[-1]) == rows
    assert bool((ends.diff() >= 0).all()) and int(ends[0]) >= 0
    ids = made("group_ids", "M", rows, groups, seed)
    assert bool(((ids >= 0) & (ids < groups)).all()) and bool((ids.diff() >= 0).all())
    counts = made("masked_m", "G", rows, groups, seed)
    assert bool(((counts >= 0) & (counts <= rows)).all())

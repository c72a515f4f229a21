"""What rules make for the groups of a grouped product, and for rows sorted by expert, is valid, whatever the sizes."""

from __future__ import annotations

from typing import Any

import torch
from definitions import definition, tensor, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.replay.datasets.inputs import make_inputs
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation


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


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def results(
    operator: str, arguments: dict[str, Any], **axes: int
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The inputs that are made for the Definition of a call, by name, and what its reference makes of them."""
    kernel = recognize(Invocation(operator, arguments))
    assert kernel is not None
    of = kernel.definition()
    inputs = make_inputs(of, workload(of, **axes), None, seed=sum(axes.values())).inputs
    outputs = compile_reference(of.reference, of.name)(*inputs)
    return dict(zip(of.inputs, inputs, strict=True)), list(outputs) if isinstance(outputs, tuple) else [outputs]


@settings(deadline=None, max_examples=20)
@given(tokens=st.integers(1, 100), top_k=st.sampled_from([1, 4]))
def test_each_slot_has_a_row(tokens: int, top_k: int) -> None:
    slots = ints(tokens * top_k)
    arguments = {"NonzeroIndx": ints(tokens, top_k, dtype=torch.int16), "ColPartialSum": ints(-(-tokens // 32), 32)}
    arguments |= {"ColOffs": ints(32), "ColSortedIndx": slots, "RowSortedIndx": slots}
    constants = {"n_tokens": tokens, "TOKS_PER_ROW": top_k, "BLOCK_PER_TOK": 32}
    axes = {"seq_len": tokens, "num_blocks": -(-tokens // 32), "num_slots": tokens * top_k}
    inputs, (slots, rows) = results("triton::_bitmatrix_metadata_compute_stage2", {**arguments, **constants}, **axes)
    ids = inputs["topk_ids"]
    assert all(len(set(chosen)) == top_k for chosen in ids.tolist())
    assert slots.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert rows[slots.long()].tolist() == list(range(tokens * top_k))


@settings(deadline=None, max_examples=20)
@given(width=st.integers(1, 60))
def test_each_block_has_a_place_in_its_schedule(width: int) -> None:
    arguments = {"SliceSizes": ints(8), "BlockOffs": ints(4, 9), "BlockSchedule": ints(4, width)}
    constants = {"SIZES": 4, "first_block_size_log2": 4}
    inputs, (schedule,) = results(
        "triton::_ragged_tensor_metadata_compute", {**arguments, **constants}, num_blocks=width
    )
    for i, row in enumerate(schedule.tolist()):
        blocks = -(-inputs["expert_counts"] // (16 << i))
        expected = [expert + (number << 16) for expert, n in enumerate(blocks.tolist()) for number in range(n)]
        assert row == expected + inputs["block_schedule"][i, len(expected) :].tolist()


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 40))
def test_each_row_of_a_product_is_scattered_to_its_own(rows: int) -> None:
    arguments = {name: torch.empty(1, rows, 16, device="meta") for name in ("XPtr", "YPtr")}
    arguments |= {"WPtr": torch.empty(8, 16, 16, device="meta"), "WriteBackIndx": ints(rows), "writeback_size": rows}
    arguments |= {"N": 16, "K": 16, "N_EXPTS_TOT": 8, "ExptHist": ints(8), "ExptOffs": ints(9)}
    inputs, (out,) = results("triton::_matmul_ogs", arguments, num_tokens=rows)
    assert sorted(inputs["scatter"].tolist()) == list(range(rows)) and bool((out != 0).any(dim=-1).all())

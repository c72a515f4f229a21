"""Experts that a graph chose by itself, of which no Sample holds anything, are drawn so that every index is valid."""

from __future__ import annotations

import pytest
import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import replay_rule_for
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec, Value

TOKENS, TOP_K, EXPERTS, BLOCK = 5, 3, 8, 4
SLOTS = TOKENS * TOP_K


def prepared(operator: str, constants: dict[str, Value], **arguments: Value) -> BoundCall:
    args = [Argument(name=name, value=value) for name, value in arguments.items()]
    bound = BoundCall(operator, args, constants=constants)
    replay_rule_for(operator).prepare(bound)
    return bound


def ints(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "int32", device="cuda")


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16", device="cuda")


def content(bound: BoundCall, name: str) -> torch.Tensor:
    values = bound.content(name)
    assert values is not None, name
    return values


def fused(**more: Value) -> BoundCall:
    arguments: dict[str, Value] = {
        "a_ptr": floats(TOKENS, 16), "b_ptr": floats(EXPERTS, 32, 16), "c_ptr": floats(TOKENS, TOP_K, 32),
        "sorted_token_ids_ptr": ints(SLOTS + EXPERTS * (BLOCK - 1)), "expert_ids_ptr": ints(12),
        "num_tokens_post_padded_ptr": ints(1), "num_valid_tokens": SLOTS,
    }  # fmt: skip
    return prepared("triton::fused_moe_kernel", {"BLOCK_SIZE_M": BLOCK, "top_k": TOP_K}, **{**arguments, **more})


def test_each_slot_is_in_a_block_of_its_expert() -> None:
    bound = fused()
    slots, experts = content(bound, "sorted_token_ids_ptr"), content(bound, "expert_ids_ptr")
    used = int(content(bound, "num_tokens_post_padded_ptr"))
    assert used % BLOCK == 0 and used // BLOCK <= len(experts)
    of_blocks = slots[:used].reshape(-1, BLOCK)
    assert sorted(of_blocks[of_blocks < SLOTS].tolist()) == list(range(SLOTS))
    owner = {int(slot): int(experts[i]) for i, block in enumerate(of_blocks) for slot in block if slot < SLOTS}
    for token in range(TOKENS):
        assert len({owner[token * TOP_K + choice] for choice in range(TOP_K)}) == TOP_K


@pytest.mark.parametrize(("rows", "top_k"), [(TOKENS, TOP_K), (SLOTS, 1)])
def test_outputs_of_one_row_a_slot_have_experts_too(rows: int, top_k: int) -> None:
    """As SGLang's, of whose up and down products the inputs have a row for each token and for each slot."""
    bound = fused(c_ptr=floats(SLOTS, 32), a_ptr=floats(rows, 16))
    slots, experts = content(bound, "sorted_token_ids_ptr"), content(bound, "expert_ids_ptr")
    of_blocks = slots[: int(content(bound, "num_tokens_post_padded_ptr"))].reshape(-1, BLOCK)
    owner = {int(slot): int(experts[i]) for i, block in enumerate(of_blocks) for slot in block if slot < SLOTS}
    assert sorted(owner) == list(range(SLOTS))
    assert all(len({owner[row * top_k + choice] for choice in range(top_k)}) == top_k for row in range(rows))


def test_sglang_counts_one_expert_more_than_there_are() -> None:
    written = {"sorted_token_ids": ints(64), "experts_ids": ints(16), "num_tokens_post_pad": ints(1)}
    sizes = {"num_experts": EXPERTS + 1, "block_size": BLOCK, "pad_sorted_token_ids": True}
    arguments = {"topk_ids": ints(50, TOP_K), **sizes, **written, "cumsum_buffer": ints(EXPERTS + 2)}
    bound = prepared("sgl_kernel::moe_align_block_size", {}, **arguments)
    assert set(content(bound, "topk_ids").flatten().tolist()) <= set(range(EXPERTS))
    assert all(not content(bound, name).any() for name in (*written, "cumsum_buffer"))


def test_experts_are_drawn_as_often_as_a_sampled_batch_chose_them() -> None:
    bound = BoundCall("triton::fused_moe_kernel", [], routing={EXPERTS: torch.tensor([0, 90, 0, 90, 0, 0, 90, 0])})
    assert set(drawn_experts(bound, 50, TOP_K, EXPERTS).flatten().tolist()) == {1, 3, 6}
    assert len(set(drawn_experts(bound, 50, 5, EXPERTS)[0].tolist())) == 5, "others where those are too few"
    assert len(set(drawn_experts(bound, 50, TOP_K, EXPERTS + 1).flatten().tolist())) > 3, "of another layer's experts"


def test_without_slots_each_row_has_an_expert() -> None:
    bound = fused(sorted_token_ids_ptr=None, expert_ids_ptr=ints(SLOTS))
    assert bool((content(bound, "expert_ids_ptr") < EXPERTS).all())
    assert int(content(bound, "num_tokens_post_padded_ptr")) == SLOTS * BLOCK


def test_recorded_experts_stay() -> None:
    kept = torch.zeros(12, dtype=torch.int64)
    bound = BoundCall(
        "triton::fused_moe_kernel", [Argument(name="expert_ids_ptr", value=ints(12))], contents={"0": kept}
    )
    replay_rule_for(bound.operator).prepare(bound)
    assert content(bound, "expert_ids_ptr") is kept


def test_without_an_output_nothing_says_how_many_experts_a_token_has() -> None:
    with pytest.raises(Skip, match="no output that says how many"):
        fused(c_ptr=None)


def test_the_blocks_of_triton_kernels_cover_the_rows_of_each_expert() -> None:
    arguments: dict[str, Value] = {
        "YPtr": floats(1, SLOTS, 32), "ExptHist": ints(EXPERTS), "ExptOffs": ints(EXPERTS + 1), "ExptOffsSum": ints(),
        "ExptData": ints(12), "GatherIndx": ints(SLOTS), "ScatterSrcIndx": None,
    }  # fmt: skip
    bound = prepared("triton::_matmul_ogs", {"N_EXPTS_ACT": TOP_K, "BLOCK_M": BLOCK}, **arguments)
    counts, starts, data = (content(bound, name) for name in ("ExptHist", "ExptOffs", "ExptData"))
    assert int(starts[-1]) == SLOTS and torch.equal(starts.diff(), counts)
    blocks = [(int(word) & 0xFFFF, int(word) >> 16) for word in data if word >= 0]
    assert len(blocks) == int(content(bound, "ExptOffsSum"))
    rows = sorted(
        int(starts[expert]) + number * BLOCK + row
        for expert, number in blocks
        for row in range(min(BLOCK, int(counts[expert]) - number * BLOCK))
    )
    assert rows == list(range(SLOTS))
    assert sorted(content(bound, "GatherIndx").tolist()) == list(range(SLOTS))


def test_rows_that_are_added_up_are_rows_of_the_products() -> None:
    bound = prepared("triton::_reduce_grouped", {}, X=floats(1, 1, SLOTS, 32), InIndx=ints(TOKENS, TOP_K))
    assert sorted(content(bound, "InIndx").flatten().tolist()) == list(range(SLOTS))

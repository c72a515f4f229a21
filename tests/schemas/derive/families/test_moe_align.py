"""moe_align: tokens by expert, whatever the order that a kernel gives them; names, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of

OPERATOR = "_moe_C::moe_align_block_size"


def kernel(**call_arguments: Any) -> None:
    """Expert by expert, tokens in descending order; garbage behind."""
    ids, block, place = call_arguments["topk_ids"].flatten(), call_arguments["block_size"], 0
    tokens, experts = call_arguments["sorted_token_ids"].fill_(-7), call_arguments["experts_ids"].fill_(-7)
    for expert in range(call_arguments["num_experts"]):
        own = torch.nonzero(ids == expert).flatten().flip(0)
        padded = -(-len(own) // block) * block
        tokens[place : place + padded] = ids.numel()
        tokens[place : place + len(own)] = own.int()
        experts[place // block : (place + padded) // block] = expert
        place += padded
    call_arguments["num_tokens_post_pad"].fill_(place)


def buffers(tokens: int, experts: int, top_k: int, block: int) -> dict[str, Any]:
    """What vLLM allocates: the worst case."""
    longest = tokens * top_k + experts * (block - 1)
    return {
        "num_experts": experts,
        "block_size": block,
        "sorted_token_ids": torch.zeros(longest, dtype=torch.int32),
        "experts_ids": torch.zeros(-(-longest // block), dtype=torch.int32),
        "num_tokens_post_pad": torch.zeros(1, dtype=torch.int32),
        "maybe_expert_map": None,
    }


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"),
    [(1, 8, 2, 16), (5, 4, 2, 16), (33, 16, 4, 32), (64, 8, 1, 64), (200, 128, 8, 16)],
)
def test_tokens_by_expert(tokens: int, experts: int, top_k: int, block: int):
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(-1)[:, :top_k].int()
    instance = agrees(OPERATOR, kernel, topk_ids=ids, **buffers(tokens, experts, top_k, block))
    assert instance.name == f"moe_align_topk{top_k}_e{experts}_bs{block}"


def test_names_of_qwen3():
    ids = torch.empty(256, 8, dtype=torch.int32, device="meta")
    call_arguments = buffers(256, 128, 8, 32)
    definition = checked(kernel_of(OPERATOR, topk_ids=ids, **call_arguments))
    assert definition.name == "moe_align_topk8_e128_bs32"
    assert definition.var_axes == ["seq_len", "num_sorted", "num_blocks"]
    assert definition.const_axes["num_experts"] == 128  # bounds the ids that a reader draws
    assert (
        len(call_arguments["sorted_token_ids"]) == 6016 and len(call_arguments["experts_ids"]) == 188
    )  # as recorded on a GPU


def test_expert_parallel_is_declined():
    ids = torch.empty(256, 8, dtype=torch.int32, device="meta")
    call_arguments = {**buffers(256, 128, 8, 32), "maybe_expert_map": torch.zeros(128, dtype=torch.int32)}
    assert declined(OPERATOR, topk_ids=ids, **call_arguments)

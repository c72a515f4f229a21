"""moe_align: tokens by expert, whatever the order that a kernel gives them; names, what is declined, replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched
from interpreted import Launcher, kernels

from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

OPERATOR = "_moe_C::moe_align_block_size"
SMALL = "triton::_moe_align_small_numel_kernel"


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


@pytest.fixture(scope="module")
def small() -> Launcher:
    return kernels("sglang", "kernels/ops/moe/moe_align_small_numel.py")["_moe_align_small_numel_kernel"]


def sglangs(ids: torch.Tensor, experts: int, block: int, counted: bool = False) -> dict[str, Any]:
    """The arguments of `_moe_align_small_numel_kernel`, as SGLang 0.5.23 passes them."""
    longest = ids.numel() * block if ids.numel() < experts + 1 else ids.numel() + (experts + 1) * (block - 1)
    longest = -(-longest // 4) * 4
    blocks = -(-longest // block)
    return {
        "topk_ids_ptr": ids,
        "sorted_token_ids_ptr": torch.full((longest,), -7, dtype=torch.int32),
        "expert_ids_ptr": torch.full((blocks,), -7, dtype=torch.int32),
        "num_tokens_post_pad_ptr": torch.full((1 + counted,), -7, dtype=torch.int32),
        "num_experts": experts + 1,
        "block_size": block,
        "numel": ids.numel(),
        "NP": 1 << (max(ids.numel(), 2) - 1).bit_length(),
        "NB": 1 << (max(blocks, 2) - 1).bit_length(),
        "USE_GDC": False,
        "WRITE_INACTIVE_PREFIX_COUNT": counted,
    }


def other_ranks(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """The experts of tokens, int32 [tokens, top_k]; -1 where they are of another rank, as about half of them are."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 2 * experts, generator=generator).argsort(-1)[:, :top_k].int()
    return torch.where(ids < experts, ids, -1)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block"), [(1, 96, 8, 16), (7, 5, 2, 4), (8, 128, 8, 16)])
def test_tokens_of_sglangs_triton_kernel(
    small: Launcher, tokens: int, experts: int, top_k: int, block: int, counted: bool
):
    ids = other_ranks(tokens, experts, top_k)
    assert tokens == 1 or bool((ids < 0).any())
    instance = agrees(f"{SMALL}.s0123", lambda **a: small[1,](**a), **sglangs(ids, experts, block, counted))
    word = "filtered_counted" if counted else "filtered"
    assert instance.name == f"moe_align_{word}_topk{top_k}_e{experts}_bs{block}"
    assert instance.axes["num_experts"] == experts


def test_sglangs_operators_are_one_definition(small: Launcher):
    """The one in C++ names its buffers otherwise, and orders the tokens of an expert as its threads come."""
    ids = other_ranks(8, 96, 8)
    written = sglangs(ids, 96, 16)
    triton = agrees(SMALL, lambda **a: small[1,](**a), **written)
    call_arguments = {
        "topk_ids": ids,
        "sorted_token_ids": written["sorted_token_ids_ptr"],
        "experts_ids": written["expert_ids_ptr"],
        "num_tokens_post_pad": written["num_tokens_post_pad_ptr"],
        "num_experts": 97,
        "block_size": 16,
        "cumsum_buffer": torch.zeros(98, dtype=torch.int32),
    }
    operator = "sgl_kernel::moe_align_block_size"
    kernel = agrees(operator, lambda **_: None, **call_arguments, pad_sorted_token_ids=True)
    assert kernel.key == triton.key
    assert declined(operator, **call_arguments, pad_sorted_token_ids=False)
    assert declined(operator, **call_arguments, pad_sorted_token_ids=True, ignore_invalid_expert=True)


def test_launches_are_known_as_they_are_recorded():
    call_arguments = sglangs(other_ranks(8, 96, 8), 96, 16, counted=True)
    kernel = launched(SMALL, call_arguments, "NP", "NB", "USE_GDC", "WRITE_INACTIVE_PREFIX_COUNT")
    assert kernel.key == kernel_of(SMALL, **call_arguments).key
    assert checked(kernel).var_axes == ["seq_len", "num_sorted", "num_blocks"]


def test_replay_draws_experts_of_this_rank_and_keeps_sampled_ones():
    call_arguments = sglangs(torch.zeros(6, 4, dtype=torch.int32), 70, 16)
    specs = {
        name: TensorSpec(tuple(value.shape), "int32", storage=i) if isinstance(value, torch.Tensor) else value
        for i, (name, value) in enumerate(call_arguments.items())
    }
    bound = BoundCall(SMALL, [Argument(name=name, value=value) for name, value in specs.items()])
    replay_rule_for(SMALL).prepare(bound)
    drawn = bound.content("topk_ids_ptr")
    assert drawn is not None and drawn.shape == (6, 4) and 0 <= int(drawn.min()) <= int(drawn.max()) < 70
    assert all(len(row.unique()) == 4 for row in drawn)
    assert {"0", "1", "2", "3"} == set(bound.contents)
    bound.set_content("topk_ids_ptr", other_ranks(6, 70, 4))
    replay_rule_for(SMALL).prepare(bound)
    assert torch.equal(bound.contents["0"], other_ranks(6, 70, 4))

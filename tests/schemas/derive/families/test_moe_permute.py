"""moe_permute and moe_unpermute: row by row, and as vLLM's Triton kernel does; bytes, replay, what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import kernels

from kcap.schemas.derive.bound_call import BoundCall, replay_rule_for
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

SIZES = [(1, 4, 2), (5, 8, 3), (33, 16, 4)]


def permuted(tokens: int, experts: int, k: int, seed: int = 0) -> dict[str, Any]:
    """The arguments of `moe_permute`, as vLLM 0.22.1 passes them."""
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :k].int()
    return {
        "input": randn(tokens, 32, seed=seed),
        "topk_ids": ids,
        "token_expert_indices": torch.arange(tokens * k, dtype=torch.int32).reshape(tokens, k),
        "expert_map": None,
        "n_expert": experts,
        "n_local_expert": experts,
        "topk": k,
        "permuted_input": torch.empty(tokens * k, 32, dtype=torch.bfloat16),
        "expert_first_token_offset": torch.empty(experts + 1, dtype=torch.int64),
        "inv_permuted_idx": torch.empty(tokens, k, dtype=torch.int32),
        "permuted_idx": torch.full((tokens * k,), tokens * k, dtype=torch.int32),
    }


def permute(input: torch.Tensor, topk_ids: torch.Tensor, topk: int, n_expert: int, **out: Any) -> None:
    """Expert by expert, token by token."""
    row = 0
    for expert in range(n_expert):
        out["expert_first_token_offset"][expert] = row
        for token, chosen in enumerate(topk_ids.tolist()):
            if expert in chosen:
                slot = chosen.index(expert)
                out["permuted_input"][row] = input[token]
                out["inv_permuted_idx"][token, slot] = row
                out["permuted_idx"][row] = token * topk + slot
                row += 1
    out["expert_first_token_offset"][n_expert] = row


@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_rows_sorted_by_expert_and_back(tokens: int, experts: int, k: int) -> None:
    call_arguments = permuted(tokens, experts, k)
    kernel = agrees("_moe_C::moe_permute", permute, **call_arguments)
    assert kernel.name == f"moe_permute_topk{k}_e{experts}_h32"
    outputs, weights = randn(tokens * k, 32, seed=9), torch.rand(tokens, k)
    rows, starts = call_arguments["inv_permuted_idx"].flatten(), call_arguments["expert_first_token_offset"]

    def unpermute(hidden_states: torch.Tensor, **_: Any) -> None:
        for token in range(tokens):
            own = [outputs[rows[token * k + slot]].double() * weights[token, slot] for slot in range(k)]
            hidden_states[token] = torch.stack(own).sum(0)

    back = {"permuted_hidden_states": outputs, "topk_weights": weights, "inv_permuted_idx": rows, "topk": k}
    result = torch.empty(tokens, 32, dtype=torch.bfloat16)
    kernel = agrees("_moe_C::moe_unpermute", unpermute, **back, expert_first_token_offset=starts, hidden_states=result)
    assert kernel.name == f"moe_unpermute_starts_topk{k}_h32"
    agrees("_moe_C::moe_unpermute", unpermute, **back, expert_first_token_offset=None, hidden_states=result)


def test_rows_beyond_the_last_expert_are_left_out() -> None:
    """Of another rank's experts: their rows hold whatever was there."""
    outputs, weights = randn(4, 32), torch.rand(2, 2)
    outputs[3] = 1e30
    back = {"permuted_hidden_states": outputs, "topk_weights": weights, "topk": 2}
    rows = {"inv_permuted_idx": torch.tensor([2, 3, 0, 1], dtype=torch.int32)}
    starts = torch.tensor([0, 1, 3])

    def unpermute(hidden_states: torch.Tensor, **_: Any) -> None:
        hidden_states[0] = outputs[2].double() * weights[0, 0]
        hidden_states[1] = outputs[0].double() * weights[1, 0] + outputs[1].double() * weights[1, 1]

    result = torch.empty(2, 32, dtype=torch.bfloat16)
    agrees("_moe_C::moe_unpermute", unpermute, **back, **rows, expert_first_token_offset=starts, hidden_states=result)


def gathered(tokens: int, k: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(tokens * k, dtype=torch.int64).reshape(tokens, k) % 5 - 1  # some are none
    index = (
        torch.randperm(2 * tokens * k, generator=torch.Generator().manual_seed(1))[: tokens * k]
        .int()
        .reshape(tokens, k)
    )
    return {
        "input_tensor": randn(2 * tokens * k, 64),
        "recv_topk_ids": ids,
        "recv_topk_weight": torch.rand(tokens, k),
        "input_index": index,
        "output_tensor": torch.empty(tokens, 64, dtype=torch.bfloat16),
    }


def test_sums_of_vllms_triton_kernel() -> None:
    launcher = kernels("vllm", "model_executor/layers/fused_moe/deep_gemm_utils.py")["_fwd_kernel_ep_gather"]
    tensors = gathered(5, 3)
    strides = {f"{name}_stride{i}": tensor.stride(i) for name, tensor in tensors.items() for i in range(2)}
    fixed = {"total_token_num": 5, "topk_num": 3, "expert_map": None, "HAS_EXPERT_MAP": False, "BLOCK_D": 32}
    kernel = agrees(
        "triton::_fwd_kernel_ep_gather.s12345678", lambda **a: launcher[2, 5](**a), **tensors, **strides, **fixed
    )
    assert kernel.name == "moe_unpermute_ids_topk3_h64"
    assert kernel.flops == 2 * 15 * 64
    assert declined("triton::_fwd_kernel_ep_gather", **tensors, HAS_EXPERT_MAP=True)


def test_names_of_qwen3_bytes_and_what_is_declined() -> None:
    call_arguments = permuted(16, 128, 8)
    kernel = kernel_of("_moe_C::moe_permute", **call_arguments)
    assert checked(kernel).var_axes == ["seq_len"]
    assert kernel.touched is not None
    assert kernel.touched() == 16 * 32 * 2 + 128 * 4 + 128 * 32 * 2 + 129 * 8 + 2 * 128 * 4
    assert declined("_moe_C::moe_permute", **{**call_arguments, "expert_map": torch.zeros(128)})
    assert declined("_moe_C::moe_permute", **{**call_arguments, "n_local_expert": 64})


def test_replay_draws_rows_that_are_there() -> None:
    specs = {
        "permuted_hidden_states": TensorSpec((12, 32), "bfloat16"),
        "topk_weights": TensorSpec((4, 3), "float32", storage=1),
        "inv_permuted_idx": TensorSpec((12,), "int32", storage=2),
        "expert_first_token_offset": TensorSpec((5,), "int64", storage=3),
    }
    bound = BoundCall("_moe_C::moe_unpermute", [Argument(name=name, value=spec) for name, spec in specs.items()])
    replay_rule_for(bound.operator).prepare(bound)
    rows, starts = bound.content("inv_permuted_idx"), bound.content("expert_first_token_offset")
    assert rows is not None and rows.sort().values.tolist() == list(range(12))
    assert starts is not None and starts.tolist() == [0, 3, 6, 9, 12]

"""attention_merge and mla_concat: the references against vLLM's Triton kernel, interpreted, and plain PyTorch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, randn
from interpreted import kernels

MERGE = "_C::merge_attn_states"
HEADS, DIM = 3, 24
Arguments = dict[str, Any]


def parts(tokens: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Arguments:
    """Two parts of attention; a token without keys in one of them has a log-sum-exp that is infinite."""
    lse = {name: randn(HEADS, tokens, dtype=torch.float32, seed=n) for n, name in enumerate(("prefix", "suffix"))}
    lse["prefix"][0, 0], lse["suffix"][1, 0], lse["prefix"][2, 0] = -float("inf"), -float("inf"), float("inf")
    return {
        "output": torch.full((tokens, HEADS, DIM), 7.0, dtype=dtype),
        "output_lse": torch.zeros(HEADS, tokens),
        "prefix_output": randn(tokens, HEADS, DIM, dtype=dtype, seed=3),
        "prefix_lse": lse["prefix"],
        "suffix_output": randn(tokens, HEADS, DIM, dtype=dtype, seed=4),
        "suffix_lse": lse["suffix"],
        "prefill_tokens_with_context": None,
        "output_scale": None,
        **more,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("merged", [None, 4])
def test_merge_is_vllms_triton_kernel(dtype: torch.dtype, merged: int | None):
    text = "class float8_info: min = max = 0.0"
    launcher = kernels("vllm", "v1/attention/ops/triton_merge_attn_states.py", head=text)["merge_attn_states_kernel"]
    names = inspect.signature(launcher.kernel.fn).parameters

    def run(**call: Any) -> None:
        output, lse = call["output"], call["output_lse"]
        sizes: Arguments = {"HEAD_SIZE": DIM, "PADDED_HEAD_SIZE": 32, "OUTPUT_LSE": lse is not None, "USE_FP8": False}
        for part in ("prefix", "suffix", "output"):
            sizes[f"{part}_head_stride"] = DIM
            sizes |= {f"{part}_lse_head_stride": len(output), f"{part}_lse_token_stride": 1}
        tokens = len(output) if merged is None else merged
        values = {**call, **sizes, "prefill_tokens_with_context": tokens, "FP8_MIN": 0.0, "FP8_MAX": 0.0}
        launcher[(len(output), HEADS)](**{name: values[name] for name in names})

    for operator in (MERGE, "triton::merge_attn_states_kernel.s01234567"):
        for tokens in (1, 6):
            more = {"prefill_tokens_with_context": merged}
            kernel = agrees(operator, run, **parts(tokens, dtype, **more))
            assert kernel.inputs["num_merged"].get() == min(tokens, merged or tokens)
            without = agrees(operator, run, **parts(tokens, dtype, **more, output_lse=None))
            assert "_nolse" in without.name and list(without.outputs) == ["output"]


def test_merged_attention_is_attention_over_all_keys():
    """What the merge is for: the two parts of a softmax."""
    logits, values = torch.randn(2, HEADS, 5, 40), torch.randn(2, HEADS, 40, DIM)
    halves = [(logits[0, ..., :16], values[0, :, :16]), (logits[0, ..., 16:], values[0, :, 16:])]
    outputs = [(part.softmax(-1) @ v).transpose(0, 1) for part, v in halves]
    lses = [part.logsumexp(-1) for part, _ in halves]

    def run(output: torch.Tensor, output_lse: torch.Tensor, **_: Any) -> None:
        output.copy_((logits[0].softmax(-1) @ values[0]).transpose(0, 1))
        output_lse.copy_(logits[0].logsumexp(-1))

    named = {"prefix_output": outputs[0], "prefix_lse": lses[0], "suffix_output": outputs[1], "suffix_lse": lses[1]}
    agrees(MERGE, run, output=torch.empty(5, HEADS, DIM), output_lse=torch.empty(HEADS, 5), **named)


def test_names_and_what_is_declined():
    kernel = kernel_of(MERGE, **parts(5))
    definition = checked(kernel)
    assert definition.name == "attention_merge_h3_d24" and list(definition.outputs) == ["output", "output_lse"]
    assert definition.const_axes == {"num_qo_heads": HEADS, "head_dim": DIM}
    assert declined(MERGE, **parts(5, output_scale=torch.ones(1)))
    assert declined(MERGE, **{**parts(5), "output": torch.empty(5, HEADS, DIM, dtype=torch.float8_e4m3fn)})


def test_queries_of_latent_attention_are_joined():
    def run(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
        q_out[..., :512], q_out[..., 512:] = ql_nope, q_pe

    call_arguments = {
        "ql_nope": randn(16, 7, 512, seed=1).transpose(0, 1),
        "q_pe": randn(7, 16, 64, seed=2),
        "q_out": randn(7, 16, 576),
    }
    assert agrees("_C_cache_ops::concat_mla_q", run, **call_arguments).name == "mla_concat_h16_ckv512_kpe64"
    assert declined("_C_cache_ops::concat_mla_q", **{**call_arguments, "q_out": call_arguments["q_out"].float()})

"""attention_merge and mla_concat: the references against vLLM's Triton kernel, interpreted, and plain PyTorch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, launched, on_meta, randn
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


def keys(tokens: int, heads: int, n: int, p: int, *dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """Parts as models have them: of a projection together with the values, and of the latent's."""
    dtypes = dtypes or (torch.bfloat16,) * 3
    return {
        "k": torch.full((tokens, heads, n + p), 7.0, dtype=dtypes[0]),
        "k_nope": randn(tokens, heads, 2 * n, dtype=dtypes[1], seed=1)[..., :n],
        "k_rope": randn(tokens, 1, 3 * p, dtype=dtypes[2], seed=2)[..., p : 2 * p],
    }


def launched_keys(call: dict[str, torch.Tensor]) -> Arguments:
    """The arguments of SGLang's Triton kernels."""
    k, nope, rope = call.values()
    strides = {"k_stride0": k.stride(0), "k_stride1": k.stride(1), "rope_stride0": rope.stride(0)}
    strides |= {"nope_stride0": nope.stride(0), "nope_stride1": nope.stride(1)}
    sizes = {"head_cnt": k.shape[1], "nope_dim": nope.shape[2], "rope_dim": rope.shape[2]}
    return {f"{name}_ptr": tensor for name, tensor in call.items()} | strides | sizes


CASTS = [(torch.bfloat16,) * 3, (torch.float16, torch.float32, torch.bfloat16), (torch.float32,) * 3]


@pytest.mark.parametrize("dtypes", CASTS)
@pytest.mark.parametrize(("tokens", "heads", "n", "p"), [(5, 4, 32, 16), (1, 1, 64, 32), (3, 6, 32, 64)])
def test_keys_are_joined_as_sglangs_kernels_do(
    tokens: int, heads: int, n: int, p: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    name = "concat_and_cast_mha_k_kernel" if heads & (heads - 1) == 0 else "concat_and_cast_mha_k_pad_kernel"
    found, padded = kernels("sglang", "kernels/ops/attention/mla_qk_prep.py"), {"HEAD_BLOCK": 8} if heads == 6 else {}
    call = launched_keys(keys(tokens, heads, n, p, *dtypes)) | padded
    kernel = agrees(f"triton::{name}.s01234567", lambda **call: found[name][(tokens,)](**call), **call)
    words = {CASTS[0]: "", CASTS[1]: "_fp32_kpe_bf16_to_fp16", CASTS[2]: "_fp32"}[dtypes]
    assert kernel.name == f"mla_concat_k{words}_h{heads}_nope{n}_kpe{p}"
    fixed = [name for name in call if not name.endswith("_ptr")]
    assert launched(f"triton::{name}", call, *fixed).key == kernel.key


def test_keys_are_joined_by_libraries() -> None:
    """Each token's rotated part follows each of its heads: FlashInfer's source and SGLang's, which has no names."""

    def run(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
        for token in range(len(k)):
            for head in range(k.shape[1]):
                k[token, head] = torch.cat((k_nope[token, head], k_rope[token, 0]))

    call = keys(3, 128, 128, 64)
    for operator in ("flashinfer::concat_mla_k", "sgl_kernel::concat_mla_k"):
        assert agrees(operator, run, **call).name == "mla_concat_k_h128_nope128_kpe64"
    unnamed = {f"arg{place}": tensor for place, tensor in enumerate(keys(3, 128, 128, 64).values())}
    agrees("tvm::concat_mla_k", lambda **call: run(*call.values()), **unnamed)
    assert declined("flashinfer::concat_mla_k", **{**call, "k": call["k"].float()})
    assert declined("flashinfer::concat_mla_k", **{**call, "k": call["k"][:2]})
    assert declined("flashinfer::concat_mla_k", **{**call, "k_rope": call["k_nope"]})
    triton = launched_keys(call)
    assert not declined("triton::concat_and_cast_mha_k_kernel", **triton)
    quantized = {"k_ptr": call["k"].to(torch.float8_e4m3fn)}
    for other in (quantized, {"head_cnt": 64}, {"nope_stride1": 1}, {"k_stride0": 1}, {"k_ptr": call["k"].mT.mT[:2]}):
        assert declined("triton::concat_and_cast_mha_k_kernel", **on_meta(triton | other)), other

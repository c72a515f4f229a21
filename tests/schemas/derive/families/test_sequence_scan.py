"""mamba2_scan: the reference against vLLM's kernel for CPUs; what is declined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn
from paging import starts

from kcap.schemas.derive.cost import cost_of_instance

OPERATOR = "_C::mamba_chunk_scan_fwd_cpu"


def arguments(counts: list[int], h: int, d: int, s: int, g: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Sequences of these lengths, each with a state of before."""
    tokens, real = sum(counts), torch.float32
    return {
        "out": torch.zeros(tokens, h, d, dtype=dtype),
        "final_states": randn(len(counts), h, d, s, dtype=real),
        "x": randn(tokens, h, d, dtype=dtype, seed=1),
        "dt": torch.nn.functional.softplus(randn(tokens, h, dtype=real, seed=2)),
        "A": -randn(h, dtype=real, seed=3).exp(),
        "B": randn(tokens, g, s, dtype=dtype, seed=4),
        "C": randn(tokens, g, s, dtype=dtype, seed=5),
        "D": randn(h, dtype=real, seed=6),
        "z": None,
        "cu_seqlens": starts(counts),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("counts", "h", "g"), [([1], 2, 1), ([70, 3, 9], 4, 2)])
def test_reference_is_vllms_kernel(counts: list[int], h: int, g: int, dtype: torch.dtype):
    load_vllm_kernels()
    instance = agrees(OPERATOR, torch.ops._C.mamba_chunk_scan_fwd_cpu, **arguments(counts, h, 16, 16, g, dtype))
    assert instance.name == f"mamba2_scan{'' if dtype == torch.bfloat16 else '_fp32'}_h{h}_d16_s16_ng{g}"


def test_without_a_skip():
    load_vllm_kernels()
    call = {**arguments([5, 2], 2, 16, 16, 1), "D": None}
    assert agrees(OPERATOR, torch.ops._C.mamba_chunk_scan_fwd_cpu, **call).name == "mamba2_scan_noD_h2_d16_s16_ng1"


def test_work_and_what_is_declined():
    usual = arguments([5, 2], 2, 16, 16, 1)
    instance = kernel_of(OPERATOR, **usual)
    assert cost_of_instance(instance).flops == 6 * 7 * 2 * 16 * 16
    assert checked(instance).var_axes == ["total_tokens", "num_seqs", "len_indptr"]
    assert declined(OPERATOR, **{**usual, "z": usual["x"]}), "a gate"

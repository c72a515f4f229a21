"""Kernels of TVM's libraries by their names and shapes; tests/capture/test_relax_vm.py has real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, declined, kernel_of

from kcap.schemas.derive.families.relax_vm.kernels import taken_from
from kcap.schemas.recording.operators import base_of

A, B, C, RESIDUAL = torch.randn(1, 3, 8), torch.randn(8, 16), torch.zeros(1, 3, 16), torch.randn(1, 3, 16)


def writes_last(compute: Any) -> Any:
    """A kernel that writes what `compute` makes of the others to its last argument."""

    def run(**arguments: torch.Tensor) -> None:
        *inputs, out = arguments.values()
        out.copy_(compute(*inputs).reshape(out.shape))

    return run


@pytest.mark.parametrize(
    ("operator", "base"),
    [
        ("tvm::fused_split1_silu1_multiply1.5b7b8200", "tvm::fused_split_silu_multiply"),
        ("tvm::fused_NT_matmul12_add3.5b7b8200", "tvm::fused_NT_matmul_add"),
        ("tvm::layer_norm.5b7b8200", "tvm::layer_norm"),
        ("tvm::gemm_sm100", "tvm::gemm_sm100"),  # tvm-ffi's: no library's number
        ("triton::kernel_2.s1234abcd", "triton::kernel_2"),
    ],
)
def test_the_compilers_numbers_are_no_part_of_a_kernels_kind(operator: str, base: str) -> None:
    assert base_of(operator) == base


def test_products_of_matrices_that_lie_either_way() -> None:
    run = writes_last(lambda a, b: a @ b)
    assert agrees("tvm::matmul3.5b7b8200", run, arg0=A, arg1=B, arg2=C.clone()).name == "gemm_fp32_n16_k8"
    run = writes_last(lambda a, b: a @ b.T)
    transposed = B.T.contiguous()
    assert agrees("tvm::NT_matmul.5b7b8200", run, arg0=A, arg1=transposed, arg2=C.clone()).name == "gemm_fp32_n16_k8"
    assert declined("tvm::matmul.5b7b8200", arg0=A, arg1=transposed, arg2=C)


def test_products_to_which_a_residual_or_a_bias_is_added() -> None:
    run = writes_last(lambda a, b, added: a @ b + added)
    kernel = agrees("tvm::fused_matmul1_add1.5b7b8200", run, arg0=A, arg1=B, arg2=RESIDUAL, arg3=C.clone())
    assert kernel.name == "gemm_add_fp32_n16_k8"
    bias = torch.randn(16)
    kernel = agrees("tvm::fused_matmul1_add.5b7b8200", run, arg0=A, arg1=B, arg2=bias, arg3=C.clone())
    assert kernel.name == "gemm_bias_fp32_n16_k8"
    assert declined("tvm::fused_matmul_add.5b7b8200", arg0=A, arg1=B, arg2=RESIDUAL[..., :1], arg3=C)


def test_a_gelu_is_the_one_that_its_name_says() -> None:
    def gelu(approximate: str) -> Any:
        return writes_last(lambda x: torch.nn.functional.gelu(x[..., :4], approximate=approximate) * x[..., 4:])

    x, out = 3 * torch.randn(5, 8), torch.zeros(5, 4)
    agrees("tvm::fused_split_gelu_multiply.5b7b8200", gelu("none"), arg0=x, arg1=out.clone())
    agrees("tvm::fused_split2_gelu_tanh1_multiply.5b7b8200", gelu("tanh"), arg0=x, arg1=out.clone())
    assert declined("tvm::fused_split_gelu_multiply.5b7b8200", arg0=x, arg1=torch.zeros(5, 8))


def test_rows_of_hidden_states_are_no_embedding() -> None:
    table, index, out = torch.randn(1, 9, 4), torch.tensor([8, 0], dtype=torch.int32), torch.zeros(1, 2, 4)
    run = writes_last(lambda rows, chosen: rows[0, chosen.long()])
    assert agrees("tvm::take.5b7b8200", run, arg0=table, arg1=index, arg2=out).op_type == "index_select"
    assert declined("tvm::take.5b7b8200", arg0=torch.randn(2, 9, 4), arg1=index, arg2=torch.zeros(2, 2, 4))


def test_what_take_indexes_is_bounded_by_the_smallest_dimension_that_may_be_meant() -> None:
    assert taken_from((1, 9, 4), (2,), (1, 2, 4)) == 9
    assert taken_from((256, 4), (2,), (2, 4)) == 256
    assert taken_from((9, 4), (4,), (9, 4)) == 4
    assert taken_from((4, 9, 9), (9,), (4, 9, 9)) == 9


def test_a_split_without_rotation_and_one_with_a_scale() -> None:
    qkv = torch.randn(3, 8, 6)
    heads = {"q": torch.zeros(3, 4, 6), "k": torch.zeros(3, 2, 6), "v": torch.zeros(3, 2, 6)}
    given = {"qkv": qkv, "position_map": torch.tensor([0, 5, 70], dtype=torch.int32), **heads}

    def split(qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> None:
        for out, part in zip((q, k, v), qkv.split([4, 2, 2], dim=1), strict=True):
            out.copy_(part)

    assert agrees("tvm::split_rotary.5b7b8200", split, **given, apply_rope=0).name == "split_rope_fp32_split_h4_kv2_d6"
    assert declined("tvm::split_rotary.5b7b8200", **given, apply_rope=1), "with what base, nobody tells"
    constants = {"rope_theta": 5e5, "rope_scale": 0.5}
    kernel = kernel_of("tvm::split_rotary.5b7b8200", **given, apply_rope=1, **constants)
    assert kernel.name == "split_rope_fp32_theta500000_scale0.5_h4_kv2_d6"


def test_what_the_references_of_attention_do_not_model_is_declined() -> None:
    pages = torch.randn(4, 2, 2, 16, 8)
    given = {
        "q": torch.randn(2, 4, 8),
        "pages": pages,
        "page_table_indptr": torch.tensor([0, 1, 3], dtype=torch.int32),
        "page_table_values": torch.tensor([2, 0, 3], dtype=torch.int32),
        "length_info": torch.tensor([7, 16], dtype=torch.int32),
        "output": torch.zeros(2, 4, 8),
        "lse": torch.zeros(2, 4),
        "sm_scale": 0.3,
    }
    kernel = kernel_of("tvm::attention_decode.5b7b8200", **given, rotary_mode=0)
    assert kernel.inputs["kv_last_page_len"].get().tolist() == [7, 16]
    assert declined("tvm::attention_decode.5b7b8200", **given, rotary_mode=1), "it rotates keys as it reads them"
    window = torch.zeros(3, 2, dtype=torch.int32)
    assert declined("tvm::attention_decode.5b7b8200", **{**given, "length_info": window}, rotary_mode=0)

"""silu_and_mul and its kin: names, references against vLLM's CPU operators, what is declined."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, checked, declined, kernel_of, load_vllm_kernels, randn

OPERATORS = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": torch.nn.functional.gelu,
    "gelu_tanh_and_mul": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
}
SIZES = [(1, 64), (7, 128), (16, 96), (33, 1024), (128, 352)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_vllms_cpu_operator(name: str, dtype: torch.dtype):
    load_vllm_kernels()
    run = getattr(torch.ops._C, name)
    for seed, (rows, hidden) in enumerate(SIZES):
        x = randn(rows, 2 * hidden, dtype=dtype, seed=seed)
        agrees(f"_C::{name}", run, out=torch.empty(rows, hidden, dtype=dtype), input=x)


@pytest.mark.parametrize("name", OPERATORS)
def test_leading_dimensions_are_joined(name: str):
    x = randn(3, 5, 64)

    def run(input: torch.Tensor, out: None, enable_pdl: None) -> torch.Tensor:
        return OPERATORS[name](input[..., :32]) * input[..., 32:]

    kernel = agrees(f"flashinfer::{name}", run, input=x, out=None, enable_pdl=None)
    assert kernel.sizes()["num_tokens"] == 15


@pytest.mark.parametrize("name", OPERATORS)
def test_sglangs_operators_on_a_cpu_return(name: str):
    agrees(f"sgl_kernel::{name}_cpu", lambda input: OPERATORS[name](input[:, :32]) * input[:, 32:], input=randn(5, 64))


def test_sglangs_operator_says_which_activation():
    x, out = randn(4, 64), torch.empty(4, 32, dtype=torch.bfloat16)

    def run(op_name: str, input: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(OPERATORS["gelu_tanh_and_mul"](input[:, :32]) * input[:, 32:])

    kernel = agrees("sglang::_run_activation_inplace", run, op_name="gelu_tanh", input=x, out=out)
    assert kernel.name == "gelu_tanh_and_mul_h32" and kernel.family == "activation"
    assert declined("sglang::_run_activation_inplace", op_name="relu2", input=x, out=out)


def test_names_of_llama():
    x = torch.empty(256, 28672, dtype=torch.bfloat16, device="meta")
    definition = checked(kernel_of("_C::silu_and_mul", result=torch.empty(256, 14336, device="meta"), input=x))
    assert definition.name == "silu_and_mul_h14336"
    assert definition.const_axes == {"hidden_size": 14336, "gate_up_size": 28672}
    assert definition.var_axes == ["num_tokens"]
    assert kernel_of("_C::silu_and_mul", input=x.half(), out=x).name == "silu_and_mul_fp16_h14336"


def test_vllms_region_says_its_approximation():
    x = torch.empty(4, 64, device="meta")
    assert kernel_of("vllm_custom_op::gelu_and_mul", x=x, approximate="tanh").name == "gelu_tanh_and_mul_fp32_h32"
    assert kernel_of("vllm_custom_op::gelu_and_mul", x=x, approximate="none").name == "gelu_and_mul_fp32_h32"
    assert declined("vllm_custom_op::gelu_and_mul", x=x)


def test_odd_widths_are_declined():
    odd, out = torch.empty(4, 63, device="meta"), torch.empty(4, 31, device="meta")
    assert declined("_C::silu_and_mul", input=odd, out=out)

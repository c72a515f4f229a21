"""silu_and_mul and its kin: names, references against vLLM's CPU operators, what is declined."""

from __future__ import annotations

from collections.abc import Callable

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


ELEMENTWISE = {  # as vLLM's layers have them in PyTorch
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3)))),
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_of_each_element(name: str, dtype: torch.dtype):
    load_vllm_kernels()
    x, out = randn(5, 3, 96, dtype=dtype), torch.empty(5, 3, 96, dtype=dtype)
    kernel = agrees(f"_C::{name}", getattr(torch.ops._C, name), out=out, input=x)
    words = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_quick": "quick_gelu"}
    assert kernel.name == f"{words[name]}{'' if dtype == torch.bfloat16 else '_fp32'}_h96"
    agrees(f"_C::{name}", lambda out, input: out.copy_(ELEMENTWISE[name](input.double())), out=out, input=x)


@pytest.mark.parametrize(
    ("name", "activation", "run"),
    [("NewGELU", "gelu_tanh", ELEMENTWISE["gelu_new"]), ("QuickGELU", "quick_gelu", ELEMENTWISE["gelu_quick"])],
)
def test_sglangs_classes_of_each_element(name: str, activation: str, run: Callable[[torch.Tensor], torch.Tensor]):
    x = randn(5, 96)
    kernel = agrees(f"sglang_op::{name}", lambda x, is_torch_compile: run(x), x=x, is_torch_compile=False)
    assert (kernel.name, kernel.family) == (f"{activation}_h96", "activation")


def test_relu_in_place_and_not():
    kernel = agrees("aten::relu", torch.ops.aten.relu.default, self=randn(7, 64))
    assert kernel.name == "relu_h64" and kernel.family == "activation"
    assert agrees("aten::relu_", torch.ops.aten.relu_.default, self=randn(7, 64)).key == kernel.key
    assert declined("aten::relu", self=torch.zeros(7, 64, dtype=torch.int32))


def test_gates_that_lie_elsewhere_or_are_bounded():
    """In PyTorch as vLLM's layers have them (`forward_native`)."""
    x, silu = 4 * randn(9, 64), torch.nn.functional.silu
    d = x.double()
    expected = {
        "mul_and_silu": (d[:, :32] * silu(d[:, 32:]), {}),
        "silu_and_mul_with_clamp": (silu(d[:, :32].clamp(max=3.0)) * d[:, 32:].clamp(-3.0, 3.0), {"limit": 3.0}),
    }
    gate, up = d[:, ::2].clamp(max=7.0), d[:, 1::2].clamp(-7.0, 7.0)
    expected["swigluoai_and_mul"] = (up + 1) * gate * torch.sigmoid(1.702 * gate), {"alpha": 1.702, "limit": 7.0}
    names = set()
    for operator, (values, settings) in expected.items():
        result = {"result" if "clamp" in operator else "out": torch.empty(9, 32, dtype=torch.bfloat16)}

        def run(input: torch.Tensor, values: torch.Tensor = values, **other: object) -> None:
            written = other.get("out", other.get("result"))
            assert isinstance(written, torch.Tensor)
            written.copy_(values)

        names.add(agrees(f"_C::{operator}", run, **result, input=x, **settings).name)
    assert names == {"mul_and_silu_h32", "silu_and_mul_limit3_h32", "swigluoai_and_mul_h32"}

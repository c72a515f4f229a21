"""Activations of each element, and gated ones: the activated first half of each row, times its second half.

silu_and_mul, gelu_and_mul and gelu_tanh_and_mul are named as FlashInfer's traces of the same functions
(flashinfer/trace/templates/activation.py); the input's width is an axis of its own here. gpt-oss' `swigluoai_and_mul`
has the gate in the even columns. Formulas of the others were read in vllm/model_executor/layers/activation.py.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import Invocation, Unrecognized, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg

ACTIVATIONS = {
    "silu": "torch.nn.functional.silu(gate)",
    "gelu": "torch.nn.functional.gelu(gate)",
    "gelu_tanh": 'torch.nn.functional.gelu(gate, approximate="tanh")',
}
ELEMENTWISE = {
    **{name: text.replace("gate", "x") for name, text in ACTIVATIONS.items()},
    "quick_gelu": "x * torch.sigmoid(1.702 * x)",
    "relu": "torch.relu(x)",
}

REFERENCE = """import torch


@torch.no_grad()
def run(input):
    assert input.shape[-1] == {width}
    gate, up = {halves}
{bounds}    return ({activated} * {up}).to(input.dtype)
"""
HALVES = "input.to(torch.float32).chunk(2, dim=-1)"
COLUMNS_IN_TURN = "input.to(torch.float32).unflatten(-1, (-1, 2)).unbind(dim=-1)"
BOUNDS = "    gate, up = gate.clamp(max={limit!r}), up.clamp(-{limit!r}, {limit!r})\n"

ELEMENTWISE_REFERENCE = """import torch


@torch.no_grad()
def run(input):
    assert input.shape[-1] == {width}
    x = input.to(torch.float32)
    return ({activated}).to(input.dtype)
"""


@family(
    "activation",
    "_C::silu_and_mul",
    "sgl_kernel::silu_and_mul",
    "sgl_kernel::silu_and_mul_cpu",
    "flashinfer::silu_and_mul",
    "vllm_custom_op::silu_and_mul",
    "sglang_op::SiluAndMul",
    "trtllm::flashinfer_silu_and_mul",
)
def silu_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, "silu")


@family(
    "activation",
    "_C::gelu_and_mul",
    "sgl_kernel::gelu_and_mul",
    "sgl_kernel::gelu_and_mul_cpu",
    "flashinfer::gelu_and_mul",
)
def gelu_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, "gelu")


@family(
    "activation",
    "_C::gelu_tanh_and_mul",
    "sgl_kernel::gelu_tanh_and_mul",
    "sgl_kernel::gelu_tanh_and_mul_cpu",
    "flashinfer::gelu_tanh_and_mul",
    "trtllm::flashinfer_gelu_tanh_and_mul",
)
def gelu_tanh_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, "gelu_tanh")


@family("activation", "vllm_custom_op::gelu_and_mul", "sglang_op::GeluAndMul")
def gelu_of_class(call: Invocation) -> KernelInstance:
    """vLLM's class and SGLang's keep the approximation ("none" or "tanh") as an attribute."""
    return gated_instance(call, {"none": "gelu", "tanh": "gelu_tanh"}.get(call["approximate"], ""))


@family("activation", "sglang::_run_activation_inplace")
def activation_of_sglang(call: Invocation) -> KernelInstance:
    return gated_instance(call, call["op_name"])


@family("activation", "_C::mul_and_silu")
def mul_and_silu(call: Invocation) -> KernelInstance:
    """The second half is the gate."""
    return gated_instance(call, "silu", name="mul_and_silu", halves=f"reversed({HALVES})")


@family("activation", "_C::silu_and_mul_with_clamp")
def silu_and_mul_with_clamp(call: Invocation) -> KernelInstance:
    limit = float(call.number("limit"))
    return gated_instance(call, "silu", name=f"silu_and_mul_limit{limit:g}", bounds=BOUNDS.format(limit=limit))


@family("activation", "_C::swigluoai_and_mul")
def swigluoai_and_mul(call: Invocation) -> KernelInstance:
    """Without `alpha` and `limit` it takes its schema's."""
    alpha = 1.702 if call["alpha"] is None else float(call.number("alpha"))
    limit = 7.0 if call["limit"] is None else float(call.number("limit"))
    word = ("" if alpha == 1.702 else f"_alpha{alpha:g}") + ("" if limit == 7.0 else f"_limit{limit:g}")
    return gated_instance(
        call,
        "silu",
        name=f"swigluoai_and_mul{word}",
        halves=COLUMNS_IN_TURN,
        bounds=BOUNDS.format(limit=limit),
        activated=f"gate * torch.sigmoid({alpha!r} * gate)",
        up="(up + 1.0)",
    )


@family("activation", "trtllm::silu_and_mul")
def silu_and_mul_of_trtllm(call: Invocation) -> KernelInstance:
    """With a scale it quantizes what it computes, too; with a limit its halves are bounded."""
    call.refuse("scale", "dtype", "swiglu_limit")
    return gated_instance(call, "silu")


def gated_instance(
    call: Invocation,
    activation: str,
    name: str = "",
    halves: str = HALVES,
    bounds: str = "",
    activated: str = "",
    up: str = "up",
) -> KernelInstance:
    """`input`: [..., 2 * hidden_size], leading dimensions joined; the output: [num_tokens, hidden_size].

    `name` and the texts of the reference are those of `activation` unless given.
    """
    if activation not in ACTIVATIONS:
        raise Unrecognized(f"{call.operator}: no activation {activation!r}")
    x = call.tensor("input", "x")
    width = x.shape[-1]
    if width % 2:
        raise Unrecognized("the halves differ in width")
    x, hidden = x.reshape(-1, width), width // 2
    return KernelInstance(
        name=f"{name or f'{activation}_and_mul'}{abbreviate(x.dtype, torch.bfloat16)}_h{hidden}",
        op_type="activation",
        axes={"num_tokens": None, "hidden_size": hidden, "gate_up_size": width},
        inputs={
            "input": tensor_arg(x, "num_tokens", "gate_up_size", description="The gate's columns, then the others.")
        },
        outputs={
            "output": lazy_arg(
                x.dtype,
                ("num_tokens", "hidden_size"),
                lambda: written_or_returned(call, "result", "out").reshape(-1, hidden),
            )
        },
        reference=REFERENCE.format(
            width=width, halves=halves, bounds=bounds, activated=activated or ACTIVATIONS[activation], up=up
        ),
        description="An activated gate times the other columns."
        if name
        else f"{activation}(input[:, :{hidden}]) * input[:, {hidden}:].",
        tags=("fused",),
        constraints=("gate_up_size == 2 * hidden_size",),
        flops=5 * x.shape[0] * hidden,
    )


@family("activation", "_C::gelu_new", "_C::gelu_fast", "sglang_op::NewGELU")
def gelu_new(call: Invocation) -> KernelInstance:
    return elementwise_instance(call, "gelu_tanh")


@family("activation", "_C::gelu_quick", "sglang_op::QuickGELU")
def gelu_quick(call: Invocation) -> KernelInstance:
    """CLIP's."""
    return elementwise_instance(call, "quick_gelu")


@family("activation", "aten::relu", "aten::relu_")
def relu(call: Invocation) -> KernelInstance:
    """OPT's. In place the input is what the operator returns."""
    return elementwise_instance(call, "relu")


def elementwise_instance(call: Invocation, activation: str) -> KernelInstance:
    """`input`: [..., hidden_size], leading dimensions joined."""
    x = call.tensor("input", "self", "x")
    hidden, axes = x.shape[-1], ("num_tokens", "hidden_size")
    if not x.is_floating_point():
        raise Unrecognized("not of floats")
    x = x.reshape(-1, hidden)

    def output() -> torch.Tensor:
        return written_or_returned(call, "result", "out").reshape(-1, hidden)

    return KernelInstance(
        name=f"{activation}{abbreviate(x.dtype, torch.bfloat16)}_h{hidden}",
        op_type="activation",
        axes={"num_tokens": None, "hidden_size": hidden},
        inputs={"input": tensor_arg(x, *axes)},
        outputs={"output": lazy_arg(x.dtype, axes, output)},
        reference=ELEMENTWISE_REFERENCE.format(width=hidden, activated=ELEMENTWISE[activation]),
        description=f"{activation} of each element.",
        flops=5 * x.numel(),
    )


cost_function("activation")(CostInputs.whole)  # FLOPs are few, and not counted

"""silu_and_mul, gelu_and_mul and gelu_tanh_and_mul: the activated first half of each row, times its second half.

Names as FlashInfer's traces of the same functions have them (flashinfer/trace/templates/activation.py); the input's
width is an axis of its own here.
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

REFERENCE = """import torch


@torch.no_grad()
def run(input):
    assert input.shape[-1] == {width}
    gate, up = input.to(torch.float32).chunk(2, dim=-1)
    return ({activated} * up).to(input.dtype)
"""


@family(
    "activation",
    "_C::silu_and_mul",
    "sgl_kernel::silu_and_mul",
    "sgl_kernel::silu_and_mul_cpu",
    "flashinfer::silu_and_mul",
    "vllm_custom_op::silu_and_mul",
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
)
def gelu_tanh_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, "gelu_tanh")


@family("activation", "vllm_custom_op::gelu_and_mul")
def gelu_of_vllm(call: Invocation) -> KernelInstance:
    """vLLM's class keeps the approximation ("none" or "tanh") as an attribute."""
    return gated_instance(call, {"none": "gelu", "tanh": "gelu_tanh"}.get(call["approximate"], ""))


@family("activation", "sglang::_run_activation_inplace")
def activation_of_sglang(call: Invocation) -> KernelInstance:
    return gated_instance(call, call["op_name"])


def gated_instance(call: Invocation, activation: str) -> KernelInstance:
    """`input`: [..., 2 * hidden_size], leading dimensions joined; the output: [num_tokens, hidden_size]."""
    if activation not in ACTIVATIONS:
        raise Unrecognized(f"{call.operator}: no activation {activation!r}")
    x = call.tensor("input", "x")
    width = x.shape[-1]
    if width % 2:
        raise Unrecognized("the halves differ in width")
    x, hidden = x.reshape(-1, width), width // 2
    return KernelInstance(
        name=f"{activation}_and_mul{abbreviate(x.dtype, torch.bfloat16)}_h{hidden}",
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
        reference=REFERENCE.format(width=width, activated=ACTIVATIONS[activation]),
        description=f"{activation}(input[:, :{hidden}]) * input[:, {hidden}:].",
        tags=("fused",),
        constraints=("gate_up_size == 2 * hidden_size",),
        flops=5 * x.shape[0] * hidden,
    )


@family("activation", "sglang_op::SiluAndMul")
def sglang_class_silu_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, "silu")


@family("activation", "sglang_op::GeluAndMul")
def sglang_class_gelu_and_mul(call: Invocation) -> KernelInstance:
    return gated_instance(call, {"none": "gelu", "tanh": "gelu_tanh"}.get(call["approximate"], ""))


cost_function("activation")(CostInputs.whole)  # FLOPs are few, and not counted

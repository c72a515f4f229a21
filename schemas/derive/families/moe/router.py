"""moe_router: which experts a token goes to, from its hidden state: the router's product and the choice in one kernel.

SGLang's Triton kernels for Grok, of few tokens and experts (`cudacore`) and of more (`tensorcore`). The logits are
bounded by a tanh, then a bias is added; weights are the softmax over all experts, and of the chosen ones alone not one.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert router_weight.shape == ({e}, {h})
    logits = hidden_states.to(torch.float32) @ router_weight.to(torch.float32).T
{cap}{bias}    topk_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :{k}]
    topk_weights = torch.softmax(logits, dim=-1).gather(-1, topk_ids)
    return topk_weights, topk_ids.to(torch.int32)
"""
CAP = "    logits = torch.tanh(logits / {cap!r}) * {cap!r}\n"
BIAS = "    logits = logits + routing_bias.to(torch.float32)\n"


@family("moe_router", "triton::fused_moe_router_cudacore_kernel")
def cudacore(call: Invocation) -> KernelInstance:
    return router_instance(call, call.tensor("input_ptr"), call.tensor("moe_router_weight_ptr"))


@family("moe_router", "triton::fused_moe_router_tensorcore_kernel")
def tensorcore(call: Invocation) -> KernelInstance:
    """Tensor cores round float32 to TF32: declined. So is what replaces NaN where attention is data parallel."""
    call.refuse("dp_attn_workaround_flag")
    x, weight = call.tensor("a_ptr"), call.tensor("b_ptr")
    if torch.float32 in (x.dtype, weight.dtype) or call["topk"] > 2 or x.shape[1] % call["BLOCK_SIZE_K"]:
        raise Unrecognized("TF32, or it leaves some out")
    return router_instance(call, x, weight)


def router_instance(call: Invocation, x: torch.Tensor, weight: torch.Tensor) -> KernelInstance:
    """`x`: [seq_len, hidden_size], `weight`: [num_experts, hidden_size]; the bias: [num_experts]."""
    weights, ids = call.tensor("topk_weights_ptr"), call.tensor("topk_ids_ptr")
    bias = call.tensor("correction_bias_ptr") if call["is_correction_bias"] else None
    (tokens, h), e, k, cap = x.shape, len(weight), int(call.number("topk")), float(call["moe_softcapping"] or 0.0)
    if x.dtype != weight.dtype or x.dtype not in FLOATS or weights.dtype != torch.float32 or ids.shape[1] != k:
        raise Unrecognized("another router")
    inputs = {
        "hidden_states": tensor_arg(x, "seq_len", "hidden_size"),
        "router_weight": tensor_arg(weight, "num_experts", "hidden_size"),
    }
    if bias is not None:
        inputs["routing_bias"] = tensor_arg(bias, "num_experts")
    word = ("" if bias is None else "_bias") + abbreviate(x.dtype, torch.bfloat16) + (f"_cap{cap:g}" if cap else "")
    return KernelInstance(
        name=f"moe_router{word}_topk{k}_e{e}_h{h}",
        op_type="moe_router",
        axes={"seq_len": None, "num_experts": e, "top_k": k, "hidden_size": h},
        inputs=inputs,
        outputs={
            "topk_weights": lazy_arg("float32", ("seq_len", "top_k"), lambda: weights),
            "topk_ids": lazy_arg(ids.dtype, ("seq_len", "top_k"), lambda: ids),
        },
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            e=e,
            h=h,
            k=k,
            cap=CAP.format(cap=cap) if cap else "",
            bias="" if bias is None else BIAS,
        ),
        description="The best experts of each token, the best first, and their shares of the softmax over all.",
        flops=2 * tokens * e * h,
    )


@cost_function("moe_router")
def router_cost(inputs: CostInputs) -> Cost:
    return inputs.whole(2 * inputs["hidden_states"].numel() * len(inputs["router_weight"]))


@replay_rule("triton::fused_moe_router_cudacore_kernel", "triton::fused_moe_router_tensorcore_kernel")
class MoeRouter(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "topk_ids_ptr")

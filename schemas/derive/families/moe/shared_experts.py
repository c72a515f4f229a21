"""moe_shared_experts: SGLang's Triton kernel that puts the shared experts behind those that each token chose.

Their numbers follow those of the other experts; their weights are given for each token, or computed: the sigmoid of
logits, or of the product of the hidden states and a gate (both 0.5.23; 0.5.15 has the weights alone).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.moe.align import drawn_experts
from kcap.schemas.derive.families.moe.fused import expert_ids, expert_weights
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert topk_ids.shape[1] == topk_weights.shape[1] == {k}
    shared_ids = torch.arange({e}, {e} + {s}, dtype=topk_ids.dtype, device=topk_ids.device)
    shared = {weights}
    ids = torch.cat([topk_ids, shared_ids.expand(len(topk_ids), -1)], dim=1)
    return ids, torch.cat([topk_weights, shared.to(topk_weights.dtype).expand(-1, {s})], dim=1)
"""
SIGMOID = "torch.sigmoid(shared_weights.to(torch.float32)) * {scale!r}"
GATED = "torch.sigmoid((hidden_states.to(torch.float32) @ gate_weight.to(torch.float32))[:, None]) * {scale!r}"

OPERATOR, OP_TYPE = "triton::_fused_append_shared_experts_with_weights_kernel", "moe_shared_experts"
CHOSEN, ALL = ("seq_len", "top_k"), ("seq_len", "num_chosen")


@family("moe_shared_experts", OPERATOR)
def append_shared_experts(call: Invocation) -> KernelInstance:
    """`topk_ids_ptr`, `topk_weights_ptr`: [tokens, K], `shared_weights_ptr`: [tokens, S]; `N_BASE`: the experts."""
    ids, weights = call.tensor("topk_ids_ptr"), call.tensor("topk_weights_ptr")
    e, k, s = (int(call.number(name)) for name in ("N_BASE", "K", "S"))
    inputs = {"topk_ids": tensor_arg(ids, *CHOSEN), "topk_weights": tensor_arg(weights, *CHOSEN)}
    shared, text, word = weight_of_shared(call)
    inputs |= shared
    source = next(iter(shared.values())).value.dtype
    return KernelInstance(
        name=f"moe_shared_experts{word}{abbreviate(source, torch.float32)}_topk{k}_s{s}_e{e}",
        op_type=OP_TYPE,
        axes={
            **{axis: None for arg in inputs.values() for axis in arg.shape or ()},
            "top_k": k,
            "num_shared": s,
            "num_chosen": k + s,
            "num_experts": e,
        },
        inputs=inputs,
        outputs={
            "topk_ids_out": tensor_arg(call.tensor("out_ids_ptr"), *ALL),
            "topk_weights_out": tensor_arg(call.tensor("out_weights_ptr"), *ALL),
        },
        reference=REFERENCE.format(inputs=", ".join(inputs), e=e, k=k, s=s, weights=text),
        description="The shared experts behind those that each token chose, with their weights.",
        flops=gate_flops({name: arg.value for name, arg in inputs.items()}),
    )


def gate_flops(inputs: Mapping[str, Any]) -> int:
    """Of the product that makes the shared experts' weights; 0 where they are given."""
    return 2 * int(inputs["hidden_states"].numel()) if "hidden_states" in inputs else 0


def weight_of_shared(call: Invocation) -> tuple[dict[str, TensorArg], str, str]:
    """What their weights are made of, how, and the word for it."""
    if call["FUSE_GATE"]:
        hidden, gate = call.tensor("hidden_ptr"), call.tensor("wgate_ptr")
        inputs = {
            "hidden_states": tensor_arg(hidden, "seq_len", "hidden_size"),
            "gate_weight": tensor_arg(gate, "hidden_size"),
        }
        return inputs, GATED.format(scale=float(call.number("scale"))), f"_gated_h{hidden.shape[1]}"
    inputs = {"shared_weights": tensor_arg(call.tensor("shared_weights_ptr"), "seq_len", "num_shared")}
    if call["APPLY_SIGMOID"]:
        return inputs, SIGMOID.format(scale=float(call.number("scale"))), "_sigmoid"
    return inputs, "shared_weights", ""


@replay_rule(OPERATOR)
class AppendSharedExperts(ReplayRule):
    """Ids that no Sample holds are drawn: each token's are distinct, and none is a shared expert's."""

    def prepare(self, bound: BoundCall) -> None:
        (tokens, top_k), experts = bound.spec("topk_ids_ptr").shape, bound.integer("N_BASE")
        if bound.content("topk_ids_ptr") is None:
            bound.set_content("topk_ids_ptr", drawn_experts(bound, tokens, top_k, experts))
        set_zeros(bound, "out_ids_ptr")


valid_input("topk_ids", op_types=(OP_TYPE,))(expert_ids)
valid_input("topk_weights", "shared_weights", op_types=(OP_TYPE,))(expert_weights)


@cost_function(OP_TYPE)
def shared_experts_cost(inputs: CostInputs) -> Cost:
    return inputs.whole(gate_flops(inputs.inputs))

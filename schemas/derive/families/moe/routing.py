"""moe_routing: which experts a token goes to, and with which weights, from the router's logits.

Softmax or sigmoid scores; the best `top_k` of them, after a bias for the choice alone, and from the best groups of
experts alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; a group's score is the sum of its two best).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, abbreviate, lazy_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert routing_logits.shape[-1] == {e}
    x = routing_logits.to(torch.float32)
    scores = {score}
    choice = scores{bias}
{groups}    topk_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :{k}]
    topk_weights = scores.gather(-1, topk_ids)
{weights}    return topk_weights, topk_ids.to(torch.{ids})
"""
GROUPS = """    grouped = choice.unflatten(-1, ({n}, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk({chosen_groups}, dim=-1).indices
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
"""
RENORMALIZE = "    topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)\n"
SCALE = "    topk_weights = topk_weights * {scale!r}\n"
SCORES = {
    "softmax": "torch.softmax(x, dim=-1)",
    "sigmoid": "torch.sigmoid(x)",
    "sqrtsoftplus": "torch.nn.functional.softplus(x).sqrt()",
    "given": "x",
}


@dataclass(frozen=True)
class Router:
    """`score`: a key of SCORES; `groups` of experts, of which experts are chosen from the best `chosen_groups`."""

    score: str
    top_k: int
    renormalize: bool
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    @property
    def word(self) -> str:
        groups = f"_ng{self.groups}_kg{self.chosen_groups}" if self.groups > 1 else ""
        scale = f"_scale{self.scale:g}" if self.scale != 1.0 else ""
        return f"{self.score}{'_renorm' if self.renormalize else ''}{scale}_topk{self.top_k}{groups}"

    def reference(self, inputs: list[str], e: int, ids: str) -> str:
        return REFERENCE.format(
            inputs=", ".join(inputs),
            e=e,
            k=self.top_k,
            score=SCORES[self.score],
            bias=" + routing_bias.to(torch.float32)" if "routing_bias" in inputs else "",
            groups=GROUPS.format(n=self.groups, chosen_groups=self.chosen_groups) if self.groups > 1 else "",
            weights=(RENORMALIZE if self.renormalize else "")
            + (SCALE.format(scale=self.scale) if self.scale != 1 else ""),
            ids=ids,
        )


@family("moe_routing", "_moe_C::topk_softmax", "sgl_kernel::topk_softmax")
def topk_softmax(call: Invocation) -> KernelInstance:
    call.refuse("moe_softcapping")
    return written_topk(call, "softmax")


@family("moe_routing", "_moe_C::topk_sigmoid", "sgl_kernel::topk_sigmoid")
def topk_sigmoid(call: Invocation) -> KernelInstance:
    return written_topk(call, "sigmoid")


@family("moe_routing", "_moe_C::topk_softplus_sqrt")
def topk_softplus_sqrt(call: Invocation) -> KernelInstance:
    """DeepSeek-V4's; its first layers look experts up by token (`tid2eid`)."""
    call.refuse("tid2eid")
    return written_topk(call, "sqrtsoftplus", float(call.number("routed_scaling_factor")))


@family("moe_routing", "_moe_C::grouped_topk")
def grouped_topk(call: Invocation) -> KernelInstance:
    """`scoring_func`: 0 if the input holds scores, 1 for sigmoid."""
    groups = int(call.number("n_group", "num_expert_group"))
    top_k, chosen_groups, scale = (call.number(name) for name in ("topk", "topk_group", "routed_scaling_factor"))
    score = {0: "given", 1: "sigmoid"}.get(call["scoring_func"], "")
    router = Router(score, int(top_k), bool(call["renormalize"]), groups, int(chosen_groups), float(scale))
    return returned_topk(call, call.tensor("scores"), router, call.tensor("bias"))


@family("moe_routing", "sgl_kernel::moe_fused_gate", "sgl_kernel::kimi_k2_moe_fused_gate")
def moe_fused_gate(call: Invocation) -> KernelInstance:
    """Weights add up to one (`renormalize` is a choice of the second alone)."""
    call.refuse("num_fused_shared_experts")
    groups, chosen_groups = call["num_expert_group"] or 1, call["topk_group"] or 1
    renormalize = call["renormalize"] in (None, True)
    router = Router("sigmoid", call["topk"], renormalize, groups, chosen_groups, scale_of(call))
    return returned_topk(call, call.tensor("input"), router, call.tensor("bias"))


@family("moe_routing", "flashinfer::fused_topk_deepseek", "sglang::fused_topk_deepseek")
def fused_topk_deepseek(call: Invocation) -> KernelInstance:
    """FlashInfer's, which SGLang wraps; weights and ids are arguments."""
    call.refuse("routing_replay_out")
    groups, chosen_groups = (int(call.number(*names)) for names in (("n_group", "num_expert_group"), ("topk_group",)))
    scale = float(call.number("routed_scaling_factor", "scaling_factor"))
    router = Router("sigmoid", int(call.number("topk")), True, groups, chosen_groups, scale)
    logits, bias = call.tensor("scores", "gating_output"), call.tensor("bias", "correction_bias")
    weights, ids = call.tensor("topk_values", "topk_weights"), call.tensor("topk_indices", "topk_ids")
    if weights.dtype != torch.float32:
        raise Unrecognized("its weights are rounded")
    return routing_instance(logits, router, bias, (lambda: weights, lambda: ids), ids.dtype)


@family("moe_routing", "_C::biased_topk_cpu")
def biased_topk_cpu(call: Invocation) -> KernelInstance:
    call.refuse("num_fused_shared_experts")
    router = Router(call["scoring_func"], call["topk"], call["renormalize"], scale=scale_of(call))
    return returned_topk(call, call.tensor("gating_output"), router, call.tensor("correction_bias"))


def scale_of(call: Invocation) -> float:
    """The factor, where the operator puts it on the weights."""
    return float(call["routed_scaling_factor"] or 1.0) if call["apply_routed_scaling_factor_on_output"] else 1.0


def written_topk(call: Invocation, score: str, scale: float = 1.0) -> KernelInstance:
    """Weights and ids are arguments; `token_expert_indices`, which permutes tokens later, is not modelled."""
    weights, ids = call.tensor("topk_weights"), call.tensor("topk_indices")
    router = Router(score, ids.shape[1], bool(call["renormalize"]), scale=scale)
    logits, bias = call.tensor("gating_output"), call.optional("bias", "correction_bias")
    return routing_instance(logits, router, bias, (lambda: weights, lambda: ids), ids.dtype)


def returned_topk(call: Invocation, logits: torch.Tensor, router: Router, bias: torch.Tensor | None) -> KernelInstance:
    return routing_instance(logits, router, bias, (lambda: call.result[0], lambda: call.result[1]), torch.int32)


def routing_instance(
    logits: torch.Tensor,
    router: Router,
    bias: torch.Tensor | None,
    results: tuple[LazyValue, LazyValue],
    ids: torch.dtype,
) -> KernelInstance:
    """`logits`: [seq_len, num_experts], `bias`: [num_experts]; `results`: weights and ids, [seq_len, top_k]."""
    if router.score not in SCORES or (router.groups > 1 and bias is None):
        raise Unrecognized("another router")
    inputs, e, chosen = (
        {"routing_logits": tensor_arg(logits, "seq_len", "num_experts")},
        logits.shape[1],
        ("seq_len", "top_k"),
    )
    if bias is not None:
        inputs["routing_bias"] = tensor_arg(bias, "num_experts")
    word = f"{'_bias' if bias is not None else ''}{abbreviate(logits.dtype, torch.float32)}"
    outputs = {
        "topk_weights": lazy_arg(torch.float32, chosen, results[0]),
        "topk_ids": lazy_arg(ids, chosen, results[1]),
    }
    return KernelInstance(
        name=f"moe_routing{word}_{router.word}_e{e}",
        op_type="moe_routing",
        axes={"seq_len": None, "num_experts": e, "top_k": router.top_k},
        inputs=inputs,
        outputs=outputs,
        reference=router.reference(list(inputs), e, outputs["topk_ids"].dtype),
        description="The best experts of each token, the best first; of equal ones the first.",
        flops=5 * logits.numel(),
    )


@replay_rule(
    "_moe_C::topk_softmax",
    "_moe_C::topk_sigmoid",
    "_moe_C::topk_softplus_sqrt",
    "flashinfer::fused_topk_deepseek",
    "sglang::fused_topk_deepseek",
)
class TopK(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "topk_indices", "topk_ids", "token_expert_indices")


cost_function("moe_routing")(CostInputs.whole)  # FLOPs are few, and not counted

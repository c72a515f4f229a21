"""moe_routing: which experts a token goes to, and with which weights, from the router's logits.

Softmax or sigmoid scores; the best `top_k` of them, after a bias for the choice alone, and from the best groups of
experts alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; a group's score is the sum of its two best).

SGLang's Triton kernel does all of it; its groups' scores are sums of the two best that differ. That it divides by one
where weights add up to zero (below the least float32) is not modelled, nor are logits that are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, LazyValue, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert routing_logits.shape[-1] == {e}
    x = routing_logits.to(torch.float32)
{cap}    scores = {score}
    choice = scores{bias}
{groups}    topk_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :{k}]
    topk_weights = scores.gather(-1, topk_ids)
{weights}    return topk_weights, topk_ids.to(torch.{ids})
"""
CAP = "    x = torch.tanh(x / {cap!r}) * {cap!r}\n"
GROUPS = """    grouped = choice.unflatten(-1, ({n}, -1))
{best}
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
"""
BEST = "    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk({chosen_groups}, dim=-1).indices"
DISTINCT = """    first = grouped.amax(dim=-1, keepdim=True)
    second = grouped.masked_fill(grouped >= first, float("-inf")).amax(dim=-1)
    best = (first[..., 0] + second).sort(dim=-1, descending=True, stable=True).indices[:, :{chosen_groups}]"""
RENORMALIZE = "    topk_weights = topk_weights / {total}\n"
SCALE = "    topk_weights = topk_weights * {scale!r}\n"
SHARED = """    shared = torch.arange({e}, {e} + {n}, device=topk_ids.device).expand(len(topk_ids), -1)
    topk_ids = torch.cat([topk_ids, shared], dim=-1)
    topk_weights = torch.nn.functional.pad(topk_weights, (0, {n}), value={weight!r})
"""
PADDED = """    padding = torch.arange(len(x), device=x.device)[:, None] >= num_unpadded
    topk_ids, topk_weights = topk_ids.masked_fill(padding, -1), topk_weights.masked_fill(padding, 0.0)
"""
SCORES = {
    "softmax": "torch.softmax(x, dim=-1)",
    "softmax_of_biased": "torch.softmax(x + routing_bias.to(torch.float32), dim=-1)",
    "sigmoid": "torch.sigmoid(x)",
    "sqrtsoftplus": "torch.nn.functional.softplus(x).sqrt()",
    "given": "x",
}


@dataclass(frozen=True)
class Router:
    """`score`: a key of SCORES, of logits bounded by `cap`; `groups` of experts, of which experts are chosen from the
    best `chosen_groups`, where `distinct` by sums of two scores that differ.

    `epsilon` is added to what renormalized weights are divided by. `shared`: experts of each token, numbered after the
    others, of `shared_weight`.
    """

    score: str
    top_k: int
    renormalize: bool
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    cap: float = 0.0
    distinct: bool = False
    epsilon: float = 0.0
    shared: int = 0
    shared_weight: float = 1.0

    @property
    def word(self) -> str:
        distinct = "_distinct" if self.distinct else ""
        groups = f"_ng{self.groups}_kg{self.chosen_groups}{distinct}" if self.groups > 1 else ""
        scale = f"_scale{self.scale:g}" if self.scale != 1.0 else ""
        cap, epsilon = f"_cap{self.cap:g}" if self.cap else "", f"_eps{self.epsilon:g}" if self.epsilon else ""
        shared = f"_shared{self.shared}_w{self.shared_weight:g}" if self.shared else ""
        renormalize = f"_renorm{epsilon}" if self.renormalize else ""
        return f"{self.score}{cap}{renormalize}{scale}_topk{self.top_k}{groups}{shared}"

    def reference(self, inputs: list[str], e: int, ids: str) -> str:
        best = (DISTINCT if self.distinct else BEST).format(chosen_groups=self.chosen_groups)
        biased = "routing_bias" in inputs and self.score != "softmax_of_biased"
        return REFERENCE.format(
            inputs=", ".join(inputs),
            e=e,
            k=self.top_k,
            cap=CAP.format(cap=self.cap) if self.cap else "",
            score=SCORES[self.score],
            bias=" + routing_bias.to(torch.float32)" if biased else "",
            groups=GROUPS.format(n=self.groups, best=best) if self.groups > 1 else "",
            weights=self.weights(e) + (PADDED if "num_unpadded" in inputs else ""),
            ids=ids,
        )

    def weights(self, e: int) -> str:
        """What becomes of the chosen scores, and of the shared experts."""
        total = "topk_weights.sum(dim=-1, keepdim=True)"
        total = f"({total} + {self.epsilon!r})" if self.epsilon else total
        return (
            (RENORMALIZE.format(total=total) if self.renormalize else "")
            + (SCALE.format(scale=self.scale) if self.scale != 1 else "")
            + (SHARED.format(e=e, n=self.shared, weight=self.shared_weight) if self.shared else "")
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


@family("moe_routing", "triton::_router_triton_kernel")
def router_triton_kernel(call: Invocation) -> KernelInstance:
    """SGLang's; `scores_ptr`: [seq_len, num_experts], `bias_ptr`: [num_experts], and of experts another one for each
    token of some id, which is declined, as is `out_packed_ptr`, which holds ids and weights again.

    Rows from `num_token_non_padded_ptr` on are padding: no experts, no weights.
    """
    call.refuse("HAS_TOKEN_BIAS", "HAS_PACKED")
    score = {0: "sigmoid", 1: "sqrtsoftplus", 2: "softmax"}.get(call["SCORING_FUNC"], "")
    bias = None if call["HAS_BIAS"] is False else call.tensor("bias_ptr")  # 0.5.15 always has one
    groups, scale, routed = int(call.number("N_GROUP")), float(call.number("routed_scaling_factor")), call["K_ROUTED"]
    if score == "softmax" and groups > 1:
        raise Unrecognized("groups by their logits")
    router = Router(
        "softmax_of_biased" if score == "softmax" and bias is not None else score,
        routed,
        bool(call["RENORMALIZE"]),
        groups,
        int(call.number("TOPK_GROUP")),
        scale if call["APPLY_SCALE"] else 1.0,
        float(call.number("moe_softcapping")) if score == "softmax" and call["HAS_SOFTCAP"] else 0.0,
        distinct=groups > 1,
        epsilon=float(call["RENORMALIZE_EPSILON"] or 0.0) if call["RENORMALIZE"] else 0.0,
        shared=call["K"] - routed,
        shared_weight=1.0 if call["APPLY_SCALE"] else 1.0 / scale,
    )
    weights, ids = call.tensor("out_weights_ptr"), call.tensor("out_indices_ptr")
    tokens = call.tensor("num_token_non_padded_ptr") if call["HAS_PADDING"] else None
    return routing_instance(call.tensor("scores_ptr"), router, bias, (lambda: weights, lambda: ids), ids.dtype, tokens)


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
    tokens: torch.Tensor | None = None,
) -> KernelInstance:
    """`logits`: [seq_len, num_experts], `bias`: [num_experts]; `results`: weights and ids, [seq_len, top_k].

    `tokens`: how many rows are no padding, one number.
    """
    if router.score not in SCORES or (router.groups > 1 and bias is None):
        raise Unrecognized("another router")
    inputs, e, chosen = (
        {"routing_logits": tensor_arg(logits, "seq_len", "num_experts")},
        logits.shape[1],
        ("seq_len", "top_k"),
    )
    if bias is not None:
        inputs["routing_bias"] = tensor_arg(bias, "num_experts")
    if tokens is not None:
        inputs["num_unpadded"] = tensor_arg(tokens.reshape(()), description="How many rows are no padding.")
    word = "_bias" if bias is not None else ""
    word += f"{'_padded' if tokens is not None else ''}{abbreviate(logits.dtype, torch.float32)}"
    outputs = {
        "topk_weights": lazy_arg(torch.float32, chosen, results[0]),
        "topk_ids": lazy_arg(ids, chosen, results[1]),
    }
    return KernelInstance(
        name=f"moe_routing{word}_{router.word}_e{e}",
        op_type="moe_routing",
        axes={"seq_len": None, "num_experts": e, "top_k": router.top_k + router.shared},
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


@replay_rule("triton::_router_triton_kernel")
class TritonRouter(ReplayRule):
    """Ids of tokens, of which some may have another bias, are private; no memory is walked by them."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "input_ids_ptr", "out_indices_ptr", "out_packed_ptr")
        tokens = bound["num_token_non_padded_ptr"]
        if isinstance(tokens, TensorSpec) and bound.content("num_token_non_padded_ptr") is None:
            rows = bound.spec("scores_ptr").shape[0]
            bound.set_content("num_token_non_padded_ptr", torch.full(tokens.shape, rows))


@valid_input("num_unpadded", op_types=("moe_routing",))
def unpadded_rows(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """All rows, as in a batch that no graph pads."""
    return torch.tensor(draft.shape("routing_logits")[0])


cost_function("moe_routing")(CostInputs.whole)  # FLOPs are few, and not counted

"""fused_moe: the experts of a mixture applied to the tokens routed to them, with FlashInfer's names.

Each expert's first matrix has the gate's rows before the others (vLLM, SGLang), or after them (FlashInfer: `_upgate`).
vLLM's on CPU are laid out for the instruction set: 16 rows lie side by side, column by column ("vec") or by pairs of
columns ("amx"); the Definition has them as matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs, distinct_bytes
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import set_indices_below
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, total_bytes, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert gemm1_weights.shape == ({e}, {g}, {h})
    x = hidden_states.to(torch.float32)
    output = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < {e}:  # another rank's
            continue
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        {halves} = (x[token] @ gemm1_weights[expert].to(torch.float32).T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ gemm2_weights[expert].to(torch.float32).T
        output.index_add_(0, token, y{weighted})
    return output.to(hidden_states.dtype)
"""
WEIGHTED = " * topk_weights[token, slot, None].to(torch.float32)"
SWIGLU, TRTLLM_SWIGLU = 3, 5  # of FlashInfer's and TensorRT-LLM's ActivationType
COLUMNS = {"vec": 1, "amx": 2}  # that lie together


@dataclass(frozen=True)
class Experts:
    """`x`: [tokens, hidden], `w1`: [experts, 2 * intermediate, hidden], `w2`: [experts, hidden, intermediate].

    `weights`, `ids`: [tokens, top_k]; an id beyond the experts is another rank's. Without `weights` each counts whole.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor

    @property
    def touched(self) -> int:
        """Bytes: of the matrices, only those of experts with tokens."""
        matrices = experts_in_use(self.ids, len(self.w1)) * total_bytes(self.w1[:1], self.w2[:1])
        weights = () if self.weights is None else (self.weights,)
        return matrices + total_bytes(self.x, self.x, *weights, self.ids)


def experts_in_use(ids: torch.Tensor, experts: int) -> int:
    """How many experts have tokens; where the ids [tokens, top_k] are not known, as many as one token has at least."""
    if ids.is_meta:
        return min(experts, ids.shape[1] if len(ids) else 0)
    return len(ids[is_local(ids, experts)].unique())


def is_local(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Which ids are of this rank's experts."""
    return (ids >= 0) & (ids < experts)


def routed_pairs(ids: torch.Tensor, experts: int) -> int:
    """Pairs of a token and one of this rank's experts; where the ids are not known, all."""
    return int(ids.numel() if ids.is_meta else is_local(ids, experts).sum())


@family("fused_moe", "_C::cpu_fused_moe")
def cpu_fused_moe(call: Invocation) -> KernelInstance:
    """Llama 4 weights the tokens before it, and has it `skip_weighted`."""
    call.refuse("w13_bias", "w2_bias")
    if call["act"] != "silu" or call["isa"] not in COLUMNS:
        raise Unrecognized("not silu, or weights of an unknown layout")
    w1, w2 = (unpacked_weights(call.tensor(name), COLUMNS[call["isa"]]) for name in ("w13", "w2"))
    weights = None if call["skip_weighted"] else call.tensor("topk_weights")
    return fused_moe_instance(call, Experts(call.tensor("input"), w1, w2, weights, call.tensor("topk_id")), "gate, up")


@family("fused_moe", "_C::fused_experts_cpu")
def fused_experts_cpu(call: Invocation) -> KernelInstance:
    call.refuse(
        "moe_comp_method", "is_vnni", "alpha", "limit", "w1_bias", "w2_bias", "w1_scale", "w2_scale", "a1_scale"
    )
    routed = call.tensor("topk_weights"), call.tensor("topk_ids")
    return fused_moe_instance(
        call, Experts(call.tensor("hidden_states"), call.tensor("w1"), call.tensor("w2"), *routed), "gate, up"
    )


@family("fused_moe", "flashinfer::cutlass_fused_moe")
def cutlass_fused_moe(call: Invocation) -> KernelInstance:
    """Expert parallel ranks take ids of all experts and have some of their own: only one rank of one is modelled."""
    call.refuse("quant_scales", "fc1_expert_biases", "fc2_expert_biases", "input_sf", "swiglu_alpha", "swiglu_beta")
    call.refuse("swiglu_limit", "min_latency_mode", "ep_rank")
    if call["ep_size"] not in (None, 1) or call["activation_type"] not in (None, SWIGLU):
        raise Unrecognized("expert parallel, or not silu and a gate")
    weights = call.tensor("fc1_expert_weights"), call.tensor("fc2_expert_weights")
    routed = call.tensor("token_final_scales"), call.tensor("token_selected_experts")
    return fused_moe_instance(call, Experts(call.tensor("input"), *weights, *routed), "up, gate")


@family("fused_moe", "trtllm::fused_moe")
def trtllm_fused_moe(call: Invocation) -> KernelInstance:
    """As FlashInfer's, whose kernels were TensorRT-LLM's; its activations have other numbers."""
    call.refuse("quant_scales", "fc1_expert_biases", "fc2_expert_biases", "input_sf", "swiglu_alpha", "swiglu_beta")
    call.refuse("swiglu_limit", "min_latency_mode", "ep_rank", "enable_alltoall", "unpadded_hidden_size")
    if call["ep_size"] not in (None, 1) or call["activation_type"] not in (None, TRTLLM_SWIGLU):
        raise Unrecognized("expert parallel, or not silu and a gate")
    weights = call.tensor("fc1_expert_weights"), call.tensor("fc2_expert_weights")
    routed = call.tensor("token_final_scales"), call.tensor("token_selected_experts")
    return fused_moe_instance(call, Experts(call.tensor("input"), *weights, *routed), "up, gate")


def unpacked_weights(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """The matrices [experts, N, K] of weights that vLLM laid out: [experts, N / 16, K / columns, 16, columns]."""
    experts, n, k = weight.shape
    return weight.reshape(experts, n // 16, k // columns, 16, columns).transpose(2, 3).reshape(experts, n, k)


def fused_moe_instance(call: Invocation, experts: Experts, halves: str) -> KernelInstance:
    """`halves`: the order of the first matrix's two parts, as the reference names them."""
    x, w1, w2 = experts.x, experts.w1, experts.w2
    if {x.dtype, w1.dtype, w2.dtype} != {x.dtype} or x.dtype not in FLOATS:
        raise Unrecognized("quantized")
    (e, g, h), (tokens, k) = w1.shape, experts.ids.shape
    unweighted = "" if experts.weights is not None else "_unweighted"
    word = f"{unweighted}{'' if halves == 'gate, up' else '_upgate'}{abbreviate(x.dtype, torch.bfloat16)}"
    summed = "" if unweighted else " by its weights"
    routed = ("seq_len", "top_k")

    def output() -> torch.Tensor:
        result = written_or_returned(call, "output", "out")
        return (result if isinstance(result, torch.Tensor) else result[0])[:tokens]  # FlashInfer returns a list of one

    inputs = {
        "hidden_states": tensor_arg(x, "seq_len", "hidden_size"),
        "gemm1_weights": tensor_arg(w1, "num_experts", "gemm1_out_size", "hidden_size", description=f"Rows: {halves}."),
        "gemm2_weights": tensor_arg(w2, "num_experts", "hidden_size", "intermediate_size"),
    }
    if experts.weights is not None:
        inputs["topk_weights"] = tensor_arg(experts.weights, *routed)
    inputs["topk_ids"] = tensor_arg(experts.ids, *routed)
    return KernelInstance(
        name=f"fused_moe{word}_topk{k}_e{e}_h{h}_i{w2.shape[2]}",
        op_type="moe",
        axes={
            "seq_len": None,
            "num_experts": e,
            "hidden_size": h,
            "intermediate_size": w2.shape[2],
            "gemm1_out_size": g,
            "top_k": k,
        },
        inputs=inputs,
        outputs={"output": lazy_arg(x.dtype, ("seq_len", "hidden_size"), output)},
        reference=REFERENCE.format(
            inputs=", ".join(inputs), e=e, g=g, h=h, halves=halves, weighted="" if unweighted else WEIGHTED
        ),
        description=f"Experts of a mixture: each token's, by silu and a gate, summed{summed}.",
        tags=("fused",),
        constraints=("gemm1_out_size == 2 * intermediate_size",),
        flops=lambda: 2 * routed_pairs(experts.ids, e) * (g * h + h * w2.shape[2]),
        touched=lambda: experts.touched,
    )


@cost_function("moe")
def moe_cost(inputs: CostInputs) -> Cost:
    """Where the kernel chooses the experts itself, only its logits are read for certain."""
    if "expert_outputs" in inputs:
        return inputs.whole()
    if "topk_ids" not in inputs:
        return inputs.cost(inputs.read("routing_logits"))
    matrices = [name for name in ("gemm1_weights", "gemm2_weights", "B") if name in inputs]
    if not matrices:
        return inputs.cost(inputs.read("topk_ids"))
    return experts_cost(inputs, inputs.index("topk_ids"), matrices)


def experts_cost(inputs: CostInputs, ids: torch.Tensor, matrices: list[str]) -> Cost:
    """`matrices`: [experts, …], each multiplied once for each token and each of its experts."""
    count = len(inputs[matrices[0]])
    expert_slices = [inputs[name][:1] for name in matrices]
    rows = inputs.read(*(name for name in ("hidden_states", "A", "topk_weights", "topk_ids") if name in inputs))
    read = rows + experts_in_use(ids, count) * sum(map(distinct_bytes, expert_slices))
    packed = "B_rows" in inputs.sizes  # several numbers to a word
    products = inputs.sizes["N"] * inputs.sizes["K"] if packed else sum(expert.numel() for expert in expert_slices)
    return inputs.cost(read, 2 * routed_pairs(ids, count) * products)


EXPERT_AXES = ("num_experts", "num_local_experts", "E")


@valid_input("topk_ids", "topk_idx", "topk_indices", "expert_ids", "expert_indices", op_types=("moe",))
def expert_ids(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Distinct experts for each token; where the description says packed, with a bfloat16 weight in the low half."""
    if (experts := draft.size(*EXPERT_AXES)) is None:
        return None
    shape = draft.shape(name)
    chosen = torch.rand((*shape[:-1], max(experts, shape[-1])), generator=draft.generator).argsort(dim=-1)
    chosen = chosen[..., : shape[-1]] % experts
    packed = "packed" in (draft.definition.inputs[name].description or "").lower()
    return chosen << 16 | _weights(draft, shape).bfloat16().view(torch.int16) if packed else chosen


@valid_input("topk_weights", "expert_weights", "routing_weights", op_types=("moe",))
def expert_weights(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """Positive, of a sum below one for each token: with one expert, too, a weight tells."""
    return _weights(draft, draft.shape(name))


def _weights(draft: WorkloadDraft, shape: tuple[int, ...]) -> torch.Tensor:
    """Softmax over one expert more than there are."""
    scores = torch.randn((*shape[:-1], shape[-1] + 1), generator=draft.generator)
    return torch.softmax(scores, dim=-1)[..., :-1]


@replay_rule("_C::cpu_fused_moe")
class FusedMoe(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "topk_id", bound.spec("w13").shape[0])


@replay_rule("flashinfer::cutlass_fused_moe")
class CutlassFusedMoe(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        ranks = bound["ep_size"]  # each has as many experts, and ids are of all
        experts = bound.spec("fc1_expert_weights").shape[0]
        set_indices_below(bound, "token_selected_experts", experts * (ranks if isinstance(ranks, int) else 1))


@replay_rule("_C::fused_experts_cpu")
class FusedExperts(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "topk_ids", bound.spec("w1").shape[0])

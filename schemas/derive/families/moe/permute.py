"""moe_permute copies each token once for each of its experts, sorted by expert; moe_unpermute adds the results up.

Around the grouped products of CUTLASS and DeepGEMM: `_moe_C::moe_permute`, `_moe_C::moe_unpermute`, and what vLLM does
in Triton for DeepGEMM (`ep_scatter`, `ep_gather` of fused_moe/deep_gemm_utils.py). `ep_scatter` gives the rows of an
expert in the order in which its threads come: it has no Definition, and is not replayed.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import set_indices_below, set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.recording.values import TensorSpec

PERMUTE = """import torch


@torch.no_grad()
def run(hidden_states, topk_ids):
    assert hidden_states.shape[-1] == {h} and topk_ids.shape[-1] == {k}
    flat = topk_ids.flatten().to(torch.int64)
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.bincount(flat, minlength={e}).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    permuted = hidden_states[order // {k}].reshape(-1, {k}, {h})
    rows, order = (index.reshape(topk_ids.shape).to(torch.int32) for index in (rows, order))
    return permuted, starts, rows, order
"""

UNPERMUTE = """import torch


@torch.no_grad()
def run({inputs}):
    assert expert_outputs.shape[-1] == {h} and topk_weights.shape[-1] == {k}
    used = {used}
    rows = expert_outputs[torch.where(used, permuted_rows, 0).to(torch.int64)].to(torch.float32)
    weights = torch.where(used, topk_weights.to(torch.float32), 0.0)
    return (rows * weights[..., None]).sum(dim=1).to(torch.{dtype})
"""


@family("moe_permute", "_moe_C::moe_permute")
def moe_permute(call: Invocation) -> KernelInstance:
    """`input`: [seq_len, hidden_size], `topk_ids`: [seq_len, top_k]; `token_expert_indices` counts up from zero."""
    call.refuse("expert_map")
    x, ids, e = call.tensor("input"), call.tensor("topk_ids"), int(call.number("n_expert"))
    permuted, starts, rows, order = (
        call.tensor(n) for n in ("permuted_input", "expert_first_token_offset", "inv_permuted_idx", "permuted_idx")
    )
    if call["n_local_expert"] not in (-1, e) or starts.dtype != torch.int64 or rows.dtype != torch.int32:
        raise Unrecognized("experts of several ranks, or indices of other types")
    (tokens, h), k = x.shape, ids.shape[1]
    return KernelInstance(
        name=f"moe_permute{abbreviate(x.dtype, torch.bfloat16)}_topk{k}_e{e}_h{h}",
        op_type="moe_permute",
        axes={"seq_len": None, "top_k": k, "hidden_size": h, "num_experts": e, "num_starts": e + 1},
        inputs={
            "hidden_states": tensor_arg(x, "seq_len", "hidden_size"),
            "topk_ids": tensor_arg(ids, "seq_len", "top_k"),
        },
        outputs={
            "permuted_states": lazy_arg(
                x.dtype, ("seq_len", "top_k", "hidden_size"), lambda: permuted.reshape(tokens, k, h), "Rows by expert."
            ),
            "expert_starts": lazy_arg("int64", ("num_starts",), lambda: starts),
            "permuted_rows": lazy_arg("int32", ("seq_len", "top_k"), lambda: rows.reshape(tokens, k)),
            "order": lazy_arg("int32", ("seq_len", "top_k"), lambda: order.reshape(tokens, k), "By expert, too."),
        },
        reference=PERMUTE.format(h=h, k=k, e=e),
        description="Each token's row for each of its experts, sorted by expert; where each expert and each row is.",
        touched=lambda: total_bytes(x, ids, permuted, starts, rows, order),
    )


@family("moe_unpermute", "_moe_C::moe_unpermute")
def moe_unpermute(call: Invocation) -> KernelInstance:
    """`inv_permuted_idx`: [seq_len * top_k], the row of each token and expert; none from the last start on."""
    starts = call.optional("expert_first_token_offset")
    weights, rows = call.tensor("topk_weights"), call.tensor("inv_permuted_idx")
    tensors = {"expert_outputs": call.tensor("permuted_hidden_states"), "topk_weights": weights}
    tensors["permuted_rows"] = rows.reshape(weights.shape)
    used = "permuted_rows >= 0"
    if starts is not None:
        tensors["expert_starts"] = starts
        used = "permuted_rows < expert_starts[-1]"
    return unpermute_instance(tensors, call.tensor("hidden_states"), used)


@family("moe_unpermute", "triton::_fwd_kernel_ep_gather")
def ep_gather(call: Invocation) -> KernelInstance:
    """`input_index`: [seq_len, top_k]; an expert of -1 is none."""
    call.refuse("HAS_EXPERT_MAP")
    names = {"expert_outputs": "input_tensor", "topk_weights": "recv_topk_weight"}
    tensors = {name: call.tensor(argument) for name, argument in names.items()}
    tensors |= {"permuted_rows": call.tensor("input_index"), "topk_ids": call.tensor("recv_topk_ids")}
    return unpermute_instance(tensors, call.tensor("output_tensor"), "topk_ids >= 0")


def unpermute_instance(tensors: dict[str, torch.Tensor], out: torch.Tensor, used: str) -> KernelInstance:
    """`tensors`: the inputs by name. `used`: which of a token's rows are added up, for the reference."""
    axes = {"expert_outputs": ("num_rows", "hidden_size"), "expert_starts": ("num_starts",)}
    x, weights = tensors["expert_outputs"], tensors["topk_weights"]
    h, k = x.shape[1], weights.shape[1]
    starts = {"num_starts": len(tensors["expert_starts"])} if "expert_starts" in tensors else {}
    word = abbreviate(x.dtype, torch.bfloat16) + (
        "" if out.dtype == x.dtype else f"_to{abbreviate(out.dtype, x.dtype)}"
    )
    kind = "_starts" if starts else "_ids" if "topk_ids" in tensors else ""
    return KernelInstance(
        name=f"moe_unpermute{kind}{word}_topk{k}_h{h}",
        op_type="moe_permute",
        axes={"seq_len": None, "top_k": k, "hidden_size": h, "num_rows": None, **starts},
        inputs={name: tensor_arg(tensor, *axes.get(name, ("seq_len", "top_k"))) for name, tensor in tensors.items()},
        outputs={"output": lazy_arg(out.dtype, ("seq_len", "hidden_size"), lambda: out)},
        reference=UNPERMUTE.format(
            inputs=", ".join(tensors), h=h, k=k, used=used, dtype=str(out.dtype).removeprefix("torch.")
        ),
        description="The sum of each token's rows, by its weights.",
        flops=2 * weights.numel() * h,
        touched=lambda: weights.numel() * h * x.element_size() + total_bytes(out, *tensors.values()) - total_bytes(x),
    )


@cost_function("moe_permute")
def permute_cost(inputs: CostInputs) -> Cost:
    """Of the experts' outputs one row for each token and expert is read."""
    if "expert_outputs" not in inputs:
        return inputs.whole()
    x, pairs = inputs["expert_outputs"], inputs["topk_weights"].numel()
    rest = [name for name in ("topk_weights", "permuted_rows", "topk_ids", "expert_starts") if name in inputs]
    return inputs.cost(pairs * x.shape[1] * x.element_size() + inputs.read(*rest), 2 * pairs * x.shape[1])


@valid_input("permuted_rows", op_types=("moe_permute",))
def permuted_rows(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """A row of its own for each token and expert."""
    shape, rows = draft.shape(name), draft.size("num_rows")
    return None if rows is None else draft.distinct(shape[0] * shape[1], rows).reshape(shape)


@valid_input("topk_ids", op_types=("moe_permute",))
def permuted_experts(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.integers(0, draft.size("num_experts") or 1, draft.shape(name))


@valid_input("expert_starts", op_types=("moe_permute",))
def expert_starts(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """Rising, from zero to all rows."""
    if (rows := draft.size("num_rows")) is None:
        return None
    starts = draft.integers(0, rows + 1, draft.shape(name)).sort().values
    starts[0], starts[-1] = 0, rows
    return starts


@replay_rule("_moe_C::moe_permute")
class MoePermute(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        set_indices_below(bound, "topk_ids", bound.integer("n_expert"))
        counting = bound.spec("token_expert_indices")
        bound.set_content("token_expert_indices", torch.arange(counting.numel).reshape(counting.shape))
        set_zeros(bound, "expert_first_token_offset", "inv_permuted_idx", "permuted_idx")


@replay_rule("_moe_C::moe_unpermute", "triton::_fwd_kernel_ep_gather")
class MoeUnpermute(ReplayRule):
    """Where rows were not recorded, each token and expert has one of its own, anywhere."""

    def prepare(self, bound: BoundCall) -> None:
        for index, table in (("inv_permuted_idx", "permuted_hidden_states"), ("input_index", "input_tensor")):
            spec = bound[index]
            if isinstance(spec, TensorSpec) and bound.content(index) is None:
                rows = torch.randperm(max(bound.spec(table).shape[0], spec.numel))[: spec.numel]
                bound.set_content(index, (rows % max(bound.spec(table).shape[0], 1)).reshape(spec.shape))
        starts = bound["expert_first_token_offset"]
        if isinstance(starts, TensorSpec) and bound.content("expert_first_token_offset") is None:
            rows = bound.spec("permuted_hidden_states").shape[0]
            bound.set_content("expert_first_token_offset", torch.linspace(0, rows, starts.numel).long())


@replay_rule("triton::_fwd_kernel_ep_scatter_2")
class EpScatter(ReplayRule):
    """It counts `expert_start_loc` up, and unchecked writes rows where that says."""

    def prepare(self, bound: BoundCall) -> None:
        raise Skip("its counters grow with each run, and rows are written where they say")

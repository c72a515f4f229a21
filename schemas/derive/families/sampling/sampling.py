"""sampling: greedy, by top-k and top-p from probabilities or logits; repetition penalties, temperature and min-p.

Sampling from probabilities has FlashInfer-Bench's names. It draws random numbers: two runs agree only in distribution.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import (
    Invocation,
    Unrecognized,
    require_values,
    total_bytes,
    written_or_returned,
)
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

GREEDY = """import torch


@torch.no_grad()
def run(logits):
    assert logits.shape[-1] == {v}
    return torch.argmax(logits, dim=-1)
"""

FROM_PROBS = """import torch


@torch.no_grad()
def run({inputs}):
    assert {scores}.shape[-1] == {v}
{softmax}    sorted_probs, order = probs.to(torch.float32).sort(dim=-1, descending=True)
{filters}    drawn = torch.multinomial(sorted_probs, 1)
    return order.gather(-1, drawn).squeeze(-1)
"""

SOFTMAX = "    probs = torch.softmax(logits.to(torch.float32), dim=-1)\n"

TOP_K = """    rank = torch.arange({v}, device=probs.device)
    k = top_k.to(torch.int64)[:, None]
    sorted_probs = torch.where((rank < k) | (k <= 0), sorted_probs, 0.0)
"""

RENORMALIZED = "    sorted_probs = sorted_probs / sorted_probs.sum(dim=-1, keepdim=True)\n"

TOP_P = """    p = top_p.to(torch.float32)[:, None]
    before = sorted_probs.cumsum(dim=-1).roll(1, dims=-1)  # the token that reaches p stays
    first = torch.arange({v}, device=probs.device) == 0
    sorted_probs = torch.where((before <= p) | (p >= 1.0) | first, sorted_probs, 0.0)
"""

PENALTIES = """import torch


@torch.no_grad()
def run(logits, prompt_mask, output_mask, repetition_penalties):
    assert logits.shape[-1] == {v}
    seen = prompt_mask | output_mask
    penalty = torch.where(seen, repetition_penalties.to(torch.float32)[:, None], 1.0)
    x = logits.to(torch.float32)
    return torch.where(x > 0, x / penalty, x * penalty).to(logits.dtype)
"""

TEMPERATURE = """import torch


@torch.no_grad()
def run(logits, idx_mapping, temperature):
    assert logits.shape[-1] == {v}
    t = temperature[idx_mapping.long()].to(torch.float32)[:, None]
    divided = (logits.to(torch.float32) / t).to(logits.dtype)
    return torch.where((t == 0.0) | (t == 1.0), logits, divided)  # 0: greedy
"""

MIN_P = """import torch


@torch.no_grad()
def run(logits, idx_mapping, min_p):
    assert logits.shape[-1] == {v}
    p = min_p[idx_mapping.long()].to(torch.float32)[:, None]
    x = logits.to(torch.float32)
    unlikely = x < x.amax(dim=-1, keepdim=True) + torch.log(p)  # p of 0 leaves all
    return logits.masked_fill(unlikely, -float("inf"))
"""

SMALLEST = 1024  # fewer columns are no vocabulary: other kernels reduce their blocks' results by an argmax
ROWS = ("batch_size", "vocab_size")


@family("greedy_sampling", "aten::argmax", "_C::greedy_argmax")
def greedy(call: Invocation) -> KernelInstance:
    """`logits`: [batch_size, vocab_size]; the first of equal ones."""
    logits = call.tensor("self", "logits")
    call.refuse("keepdim")
    if logits.dim() != 2 or call["dim"] not in (None, -1, 1) or not logits.is_floating_point():
        raise Unrecognized("not over a vocabulary")
    if logits.shape[1] < SMALLEST or (call.base == "aten::argmax" and call["dim"] is None):
        raise Unrecognized("not over a vocabulary")
    v = logits.shape[1]
    return KernelInstance(
        name=f"greedy_sampling{abbreviate(logits.dtype, torch.float32)}_v{v}",
        op_type="greedy_sampling",
        axes={"batch_size": None, "vocab_size": v},
        inputs={"logits": tensor_arg(logits, *ROWS)},
        outputs={"samples": lazy_arg("int64", ("batch_size",), lambda: written_or_returned(call, "out"))},
        reference=GREEDY.format(v=v),
        description="The token of the largest logit.",
        flops=logits.numel(),
    )


@family("top_k_sampling", "flashinfer::top_k_sampling_from_probs")
def top_k(call: Invocation) -> KernelInstance:
    return sampled_from(call, "probs", "top_k")


@family("top_p_sampling", "flashinfer::top_p_sampling_from_probs", "sgl_kernel::top_p_sampling_from_probs")
def top_p(call: Invocation) -> KernelInstance:
    return sampled_from(call, "probs", "top_p")


@family(
    "top_k_top_p_sampling",
    "flashinfer::top_k_top_p_sampling_from_probs",
    "flashinfer::top_k_top_p_sampling_from_logits",
    "sgl_kernel::top_k_top_p_sampling_from_probs",
)
def top_k_top_p(call: Invocation) -> KernelInstance:
    """Joint, as SGLang's kernel is, top-p is over all probabilities; else over what top-k left of them.

    vLLM passes logits where a request has both filters.
    """
    order = "joint" if call.base.startswith("sgl_kernel::") else call["filter_apply_order"]
    if order not in (None, "top_k_first", "joint"):
        raise Unrecognized("filters of an unknown order")
    scores = "logits" if call.base.endswith("_from_logits") else "probs"
    return sampled_from(call, scores, "top_k", "top_p", joint=order == "joint")


FILTERS = {"top_k": (TOP_K, torch.int32), "top_p": (TOP_P, torch.float32)}


def sampled_from(call: Invocation, scores: str, *filters: str, joint: bool = False) -> KernelInstance:
    """`scores`: probs or logits, [batch_size, vocab_size]; a filter's limit is a number for all rows or one for each.

    Of logits all are read: a softmax needs their sum.
    """
    call.refuse("indices", "maybe_indices", "return_valid", "top_k_max")
    rows = call.tensor(scores)
    v = rows.shape[1]
    inputs = {scores: tensor_arg(rows, *ROWS), **{name: filter_limit(call, name, rows) for name in filters}}
    return KernelInstance(
        name=f"{'_'.join(filters)}_sampling_from_{scores}{'_joint' if joint else ''}"
        f"{abbreviate(rows.dtype, torch.float32)}_v{v}",
        op_type="sampling",
        axes={"batch_size": None, "vocab_size": v},
        inputs=inputs,
        outputs={
            "samples": lazy_arg("int64", ("batch_size",), lambda: written_or_returned(call, "output").to(torch.int64))
        },
        reference=FROM_PROBS.format(
            inputs=", ".join(inputs),
            v=v,
            scores=scores,
            softmax=SOFTMAX if scores == "logits" else "",
            filters=("" if joint else RENORMALIZED).join(FILTERS[name][0].format(v=v) for name in filters),
        ),
        description=f"Sampling from what {' and '.join(filters)} leave of the probabilities.",
        random=True,
        # unfiltered, a draw from probabilities stops at the token that it draws: halfway on average
        touched=lambda: total_bytes(rows) // (1 if scores == "logits" else 2),
    )


def filter_limit(call: Invocation, name: str, rows: torch.Tensor) -> TensorArg:
    dtype = FILTERS[name][1]
    tensor = call.optional(name, f"maybe_{name}_arr")
    if tensor is not None:
        return tensor_arg(tensor.to(dtype), "batch_size")
    value = call.number(name, f"{name}_val")
    return tensor_arg(torch.full((len(rows),), value, dtype=dtype, device=rows.device), "batch_size")


@family("repetition_penalties", "_C::apply_repetition_penalties_")
def repetition_penalties(call: Invocation) -> KernelInstance:
    """Logits of tokens that were seen are divided by the penalty, negative ones multiplied. In place."""
    logits, names = call.tensor("logits"), ("prompt_mask", "output_mask")
    v = logits.shape[1]
    penalties = tensor_arg(call.tensor("repetition_penalties"), "batch_size")
    return KernelInstance(
        name=f"repetition_penalties{abbreviate(logits.dtype, torch.float32)}_v{v}",
        op_type="repetition_penalties",
        axes={"batch_size": None, "vocab_size": v},
        inputs={
            "logits": tensor_arg(logits, *ROWS),
            **{name: tensor_arg(call.tensor(name), *ROWS) for name in names},
            "repetition_penalties": penalties,
        },
        outputs={"logits_out": lazy_arg(logits.dtype, ROWS, lambda: logits)},
        reference=PENALTIES.format(v=v),
        description="Repetition penalties (Keskar et al., arXiv:1909.05858) on the tokens of prompt and output.",
        flops=logits.numel(),
        touched=lambda: total_bytes(call.tensor("prompt_mask")),  # logits of unseen tokens stay as they are
    )


@family("temperature", "triton::_temperature_kernel")
def temperature(call: Invocation) -> KernelInstance:
    """vLLM's: rows of greedy requests, and those of temperature 1, stay as they are."""
    return setting_of_requests(
        call, "temperature", TEMPERATURE, "The logits over each request's temperature, in place."
    )


@family("min_p", "triton::_min_p_kernel")
def min_p(call: Invocation) -> KernelInstance:
    """vLLM's: a token less likely than `min_p` times the likeliest one is left out."""
    return setting_of_requests(call, "min_p", MIN_P, "Logits of unlikely tokens become -inf, in place.")


def setting_of_requests(call: Invocation, name: str, reference: str, description: str) -> KernelInstance:
    """`logits_ptr`: [batch_size, vocab_size]; the setting `name`: [requests], of which each row of logits has one."""
    logits, mapping = call.tensor("logits_ptr"), call.tensor("expanded_idx_mapping_ptr")
    v = int(call.number("vocab_size"))
    if logits.shape != (len(mapping), v):
        raise Unrecognized("its logits have more columns than the vocabulary")

    def idx_mapping() -> torch.Tensor:
        return require_values(mapping, "requests of its rows")

    return KernelInstance(
        name=f"{name}{abbreviate(logits.dtype, torch.float32)}_v{v}",
        op_type=name,
        axes={"batch_size": None, "vocab_size": v, "max_num_reqs": None},
        inputs={
            "logits": tensor_arg(logits, *ROWS),
            "idx_mapping": lazy_arg(mapping.dtype, ("batch_size",), idx_mapping, "The request of each row."),
            name: tensor_arg(call.tensor(f"{name}_ptr"), "max_num_reqs"),
        },
        outputs={"logits_out": lazy_arg(logits.dtype, ROWS, lambda: logits)},
        reference=reference.format(v=v),
        description=description,
        flops=logits.numel(),
        touched=lambda: total_bytes(mapping),  # logits of requests without the setting stay as they are
    )


@replay_rule("_C::fused_gumbel_argmax", "triton::_gumbel_sample_kernel")
class GumbelSample(ReplayRule):
    """It is random, and no family's. Where its noise is drawn from bounds nothing; what it finds it writes only."""

    def prepare(self, bound: BoundCall) -> None:
        set_zeros(bound, "seeds", "seeds_ptr", "local_argmax_ptr")


@replay_rule(
    "_C::rejection_greedy_sample_kernel_impl",
    "_C::rejection_random_sample_kernel_impl",
    "triton::rejection_greedy_sample_kernel",
    "triton::rejection_random_sample_kernel",
)
class RejectionSample(ReplayRule):
    """It is no family's. Of its token ids, which are private, it writes some and compares the others: all are equal,
    so that no draft is rejected for its id."""

    def prepare(self, bound: BoundCall) -> None:
        for name in ("output", "draft", "bonus", "recovered"):
            set_zeros(bound, f"{name}_token_ids", f"{name}_token_ids_ptr")
        set_zeros(bound, "target_argmax", "target_argmax_ptr")


@valid_input("idx_mapping", op_types=("temperature", "min_p"))
def valid_requests(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    limit = draft.size("max_num_reqs")
    return draft.integers(0, limit, draft.shape(name)) if limit else None


@cost_function("temperature", "min_p")
def setting_cost(inputs: CostInputs) -> Cost:
    """No logits where no request has the setting."""
    return Cost(inputs.read("idx_mapping"), inputs.read("idx_mapping"), 0, inputs.dtype)


@cost_function("sampling", "greedy_sampling", "repetition_penalties")
def sampling_cost(inputs: CostInputs) -> Cost:
    return inputs.cost(inputs.read("logits") if "logits" in inputs else inputs.read("probs") // 2)


MOST_K = 100  # serving rarely asks for more


@valid_input("probs", "*_probs", "probabilities", op_types=("sampling",))
def valid_probabilities(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return torch.softmax(torch.randn(draft.shape(name), generator=draft.generator), dim=-1)


@valid_input("top_k*", "topk", op_types=("sampling",))
def valid_top_k(draft: WorkloadDraft, name: str) -> torch.Tensor:
    """1 to 100 tokens, or the vocabulary."""
    return draft.integers(1, min(MOST_K, draft.size("vocab_size") or MOST_K) + 1, draft.shape(name))


@valid_input("top_p*", op_types=("sampling",))
def valid_top_p(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.reals(0.1, 1.0, draft.shape(name))


@valid_input("min_p*", op_types=("sampling", "min_p"))
def valid_min_p(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.reals(0.0, 0.2, draft.shape(name))


@valid_input("temperature*", op_types=("sampling", "temperature"))
def valid_temperature(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.reals(0.1, 2.0, draft.shape(name))


@valid_input("seed*", "philox_seed", "offset", "philox_offset", op_types=("sampling",))
def valid_seeds(draft: WorkloadDraft, name: str) -> torch.Tensor:
    return draft.integers(0, 1 << 31, draft.shape(name))

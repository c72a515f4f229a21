"""moe_align sorts tokens by expert before the experts' matrices, moe_sum adds up the experts' outputs after them.

`moe_align` pads the tokens of each expert to whole blocks. The kernel fills buffers as long as the worst case and
leaves what lies past the padded tokens undefined; the order within an expert is up to its threads. Here the rest is
padding, its experts are 0, and tokens ascend. The buffers are inputs because only they say how long the outputs are.

SGLang's counts one expert more than there are: an id of -1 is of an expert of another rank, and such tokens have blocks
of their own, before all others, whose expert is -1.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.index_arguments import set_indices_below, set_zeros
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, tensor_arg
from kcap.schemas.flashinfer.descriptions import FOR_ITS_LENGTH

REFERENCE = """import torch


@torch.no_grad()
def run(topk_ids, sorted_token_ids, expert_ids):
    flat = topk_ids.flatten().to(torch.int64){plus}
    counts = torch.bincount(flat, minlength={groups})
    blocks = (counts + {last}) // {b}
    order = flat.argsort(stable=True)
    owner = flat[order]
    within = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[owner]
    tokens = torch.full_like(sorted_token_ids, len(flat))
    tokens[((blocks.cumsum(0) - blocks) * {b})[owner] + within] = order.to(tokens.dtype)
    owners = torch.arange({groups}, device=flat.device).repeat_interleave(blocks){minus}
    experts = torch.zeros_like(expert_ids)
    experts[: len(owners)] = owners.to(experts.dtype)
    return tokens, experts, {totals}.to(torch.int32)
"""
TOTAL = "(blocks.sum() * {b}).reshape(1)"
TOTALS = "torch.stack([blocks.sum() * {b}, blocks[0]])"
OTHER_RANKS = "Experts; -1: one of another rank."


@family("moe_align", "_moe_C::moe_align_block_size")
def moe_align(call: Invocation) -> KernelInstance:
    """`topk_ids`: [seq_len, top_k]. Expert parallel ranks map ids to their own experts: declined."""
    call.refuse("maybe_expert_map")
    return align_instance(call, int(call.number("num_experts")), filtered=False)


@family("moe_align", "triton::_moe_align_small_numel_kernel", "sgl_kernel::moe_align_block_size")
def moe_align_filtered(call: Invocation) -> KernelInstance:
    """`topk_ids`: [seq_len, top_k], -1 for an expert of another rank. The Triton kernel may count their blocks, too."""
    call.refuse("ignore_invalid_expert")
    if call.base.startswith("sgl_kernel") and not call["pad_sorted_token_ids"]:
        raise Unrecognized("it leaves the padding within blocks undefined")
    return align_instance(call, int(call.number("num_experts")) - 1, filtered=True)


def align_instance(call: Invocation, e: int, filtered: bool) -> KernelInstance:
    """`filtered`: ids of -1 have blocks of their own, before those of the `e` experts."""
    ids, block = call.tensor("topk_ids", "topk_ids_ptr"), int(call.number("block_size"))
    tokens = call.tensor("sorted_token_ids", "sorted_token_ids_ptr")
    experts = call.tensor("experts_ids", "expert_ids_ptr")
    total = call.tensor("num_tokens_post_pad", "num_tokens_post_pad_ptr")
    counted = bool(call["WRITE_INACTIVE_PREFIX_COUNT"])
    if tokens.dtype != torch.int32 or experts.dtype != torch.int32 or total.numel() != 1 + counted:
        raise Unrecognized("buffers of another kind")

    def end() -> int:
        return int(require_values(total, "numbers of padded tokens")[0].item())

    word = ("_filtered" if filtered else "") + ("_counted" if counted else "")
    return KernelInstance(
        name=f"moe_align{word}_topk{ids.shape[1]}_e{e}_bs{block}",
        op_type="moe",
        axes={
            "seq_len": None,
            "num_experts": e,
            "top_k": ids.shape[1],
            "num_sorted": None,
            "num_blocks": None,
            "num_totals": 1 + counted,
        },
        inputs={
            "topk_ids": tensor_arg(ids, "seq_len", "top_k", description=OTHER_RANKS if filtered else None),
            "sorted_token_ids": tensor_arg(tokens, "num_sorted", description=FOR_ITS_LENGTH),
            "expert_ids": tensor_arg(experts, "num_blocks", description=FOR_ITS_LENGTH),
        },
        outputs={
            "sorted_token_ids_out": lazy_arg(
                "int32", ("num_sorted",), lambda: ascending(tokens, experts, end(), block, ids)
            ),
            "expert_ids_out": lazy_arg("int32", ("num_blocks",), lambda: zeroed(experts, end() // block)),
            "num_tokens_post_pad": lazy_arg(
                "int32", ("num_totals",), lambda: total, "And the blocks of other ranks' experts." if counted else None
            ),
        },
        reference=REFERENCE.format(
            groups=e + filtered,
            b=block,
            last=block - 1,
            plus=" + 1" if filtered else "",
            minus=" - 1" if filtered else "",
            totals=(TOTALS if counted else TOTAL).format(b=block),
        ),
        description=f"Tokens by expert in blocks of {block}; ids from seq_len * top_k on are padding.",
        touched=lambda: total_bytes(ids, total) + ids.numel() * tokens.element_size(),
    )


SELDOM = 1e-9  # of an expert that no sampled token chose


def drawn_experts(bound: BoundCall, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Experts for each token, no two the same: int64 [tokens, top_k].

    As often as a sampled batch chose each: how many different ones a batch reads is most of a kernel's time. Where none
    was sampled, all alike.
    """
    chosen = bound.routing.get(experts, torch.ones(experts)).double()
    weights = torch.nn.functional.pad(chosen / chosen.sum() + SELDOM, (0, max(top_k - experts, 0)), value=SELDOM)
    return torch.multinomial(weights.expand(tokens, -1), top_k) % experts


def align_blocks(ids: torch.Tensor, experts: int, block: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What moe_align makes of the experts `ids` of each slot: slots by expert, [length], and the experts of blocks."""
    counts = torch.bincount(ids, minlength=experts)
    blocks = (counts + block - 1) // block
    order = ids.argsort(stable=True)
    within = torch.arange(len(ids)) - (counts.cumsum(0) - counts)[ids[order]]
    slots = torch.full((max(length, int(blocks.sum()) * block),), len(ids))
    slots[((blocks.cumsum(0) - blocks) * block)[ids[order]] + within] = order
    return slots[:length], torch.arange(experts).repeat_interleave(blocks)


def ascending(tokens: torch.Tensor, experts: torch.Tensor, end: int, block: int, ids: torch.Tensor) -> torch.Tensor:
    """The first `end` of `tokens` in order within each expert, the rest as padding."""
    padding = ids.numel()
    owner = experts[: end // block].repeat_interleave(block).to(torch.int64)
    order = (owner * (padding + 1) + tokens[:end]).argsort(stable=True)
    return torch.cat([tokens[:end][order], torch.full_like(tokens[end:], padding)])


def zeroed(values: torch.Tensor, start: int) -> torch.Tensor:
    """`values`, zero from `start` on."""
    return torch.cat([values[:start], torch.zeros_like(values[start:])])


SUM_REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert expert_outputs.shape[1:] == ({k}, {h})
    x = expert_outputs.to(torch.float32){used}
    return (x.sum(dim=1) * {scale!r}).to(expert_outputs.dtype)
"""
USED = "\n    x = torch.where(used[..., None], x, 0.0)"


@family(
    "moe_sum",
    "_moe_C::moe_sum",
    "sgl_kernel::moe_sum",
    "sgl_kernel::moe_sum_reduce",
    "triton::_moe_sum_reduce_kernel",
)
def moe_sum(call: Invocation) -> KernelInstance:
    """`input`: [seq_len, top_k, hidden_size]. SGLang's `moe_sum_reduce` scales the sum, in C++ and in Triton."""
    x, out = call.tensor("input", "input_ptr"), call.tensor("output", "output_ptr")
    return sum_instance(x, out, float(call["routed_scaling_factor"] or 1.0))


def sum_instance(
    x: torch.Tensor, out: torch.Tensor, scale: float = 1.0, used: torch.Tensor | None = None
) -> KernelInstance:
    """`x`: [seq_len, top_k, hidden_size], of whose rows those that are `used` count: [seq_len, top_k], bool."""
    tokens, k, h = x.shape
    inputs = {"expert_outputs": tensor_arg(x, "seq_len", "top_k", "hidden_size")}
    if used is not None:
        inputs["used"] = tensor_arg(used, "seq_len", "top_k", description="Whether a row counts.")
    word = ("" if used is None else "_used") + abbreviate(x.dtype, torch.bfloat16)
    word += f"_scale{scale:g}" if scale != 1.0 else ""
    return KernelInstance(
        name=f"moe_sum{word}_topk{k}_h{h}",
        op_type="moe",
        axes={"seq_len": None, "top_k": k, "hidden_size": h},
        inputs=inputs,
        outputs={"output": lazy_arg(x.dtype, ("seq_len", "hidden_size"), lambda: out)},
        reference=SUM_REFERENCE.format(
            inputs=", ".join(inputs), k=k, h=h, scale=scale, used="" if used is None else USED
        ),
        description="The sum over each token's experts.",
        flops=tokens * k * h,
    )


@replay_rule("_moe_C::moe_align_block_size")
class MoeAlign(ReplayRule):
    def prepare(self, bound: BoundCall) -> None:
        experts = bound.integer("num_experts")
        set_indices_below(bound, "topk_ids", experts)
        set_zeros(bound, "sorted_token_ids", "experts_ids", "num_tokens_post_pad")
        if bound["maybe_expert_map"] is not None:
            set_indices_below(bound, "maybe_expert_map", experts)


@replay_rule("sgl_kernel::moe_align_block_size", "triton::_moe_align_small_numel_kernel")
class SglangMoeAlign(ReplayRule):
    """SGLang counts one expert more, of choices that are another rank's (-1): sampled ones stay, none is drawn."""

    def prepare(self, bound: BoundCall) -> None:
        experts = bound.integer("num_experts") - 1
        name = "topk_ids" if bound["topk_ids"] is not None else "topk_ids_ptr"
        ids, spec = bound.content(name), bound.spec(name)
        if ids is None:
            top_k = spec.shape[-1]
            ids = drawn_experts(bound, spec.numel // max(top_k, 1), top_k, experts).reshape(spec.shape)
        bound.set_content(name, ids.clamp(-1, experts - 1))
        set_zeros(bound, "sorted_token_ids", "experts_ids", "num_tokens_post_pad", "cumsum_buffer")
        set_zeros(bound, "sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_pad_ptr")

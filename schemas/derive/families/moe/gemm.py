"""moe_gemm: one matrix of each token's experts, as the Triton `fused_moe_kernel` of vLLM and of SGLang is launched for
each of the two.

The kernel takes tokens sorted by expert and padded to blocks, or, for few tokens, an expert each. Here it is always
the experts of each row: sorting is no part of it. Rows of another rank's experts (id -1) are zero.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.families.gemm.grouped_gemm import block_counts, block_scales, scaling
from kcap.schemas.derive.families.gemm.quantized_gemm import QUANTIZED_DTYPES
from kcap.schemas.derive.families.moe import fused
from kcap.schemas.derive.families.moe.align import align_blocks, drawn_experts
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, lazy_arg, tensor_arg
from kcap.schemas.recording.values import TensorSpec

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert B.shape == ({e}, {n}, {k})
    C = torch.zeros((*topk_ids.shape, {n}), dtype=torch.float32, device=A.device)
    for g in topk_ids.unique().tolist():
        if not 0 <= g < {e}:
            continue
        rows, slots = torch.nonzero(topk_ids == g, as_tuple=True)
        a, b = A[rows].to(torch.float32), B[g].to(torch.float32)
{scales}        C[rows, slots] = a @ b.T{bias}
    return {result}.to(torch.{dtype})
"""
WHOLE_SCALES = "        a, b = a * A_scale, b * B_scale[g]\n"
WEIGHTED = "(C * topk_weights[..., None].to(torch.float32))"


@family("moe_gemm", "triton::fused_moe_kernel")
def fused_moe_kernel(call: Invocation) -> KernelInstance:
    """`a_ptr`: [rows, K], `b_ptr`: [experts, N, K], `c_ptr`: [..., N] with as many rows as all tokens have experts.

    Scales of quantized matrices are [rows, K_group] and [experts, N_group, K_group], or one for A and [experts]. A bias
    is added before the weights multiply. Declined is SGLang's where it reads its matrices through descriptors, or
    writes its rows sorted, masked, gated, or added to others.
    """
    call.refuse(
        "a_desc", "b_desc", "c_sorted", "MASK_OUTPUT", "FUSE_ADD_TO_OUTPUT", "FUSE_SUM_ALL_REDUCE", "FUSE_SWIGLU"
    )
    a, b, c = (call.tensor(name) for name in ("a_ptr", "b_ptr", "c_ptr"))
    scales = call.optional("a_scale_ptr"), call.optional("b_scale_ptr")
    if a.dtype != b.dtype or a.dtype not in (FLOATS if scales[1] is None else QUANTIZED_DTYPES):
        raise Unrecognized("matrices of two dtypes")
    if call["A_OUTPUT_SLICES"] not in (None, 1):
        raise Unrecognized("halves of its columns from halves of its rows")
    (rows, k), (e, n, _) = a.shape, b.shape
    top_k, rest = divmod(c.numel() // n, rows)
    if rest or (scales[0] is None) != (scales[1] is None):
        raise Unrecognized("rows without all of their experts, or without scales")
    inputs = {"A": tensor_arg(a, "num_rows", "K"), "B": tensor_arg(b, "num_experts", "N", "K")}
    inputs |= whole_scales(*scales, e) or block_scales(*scales, ("num_rows",), "num_experts")
    if (bias := call.optional("b_bias_ptr", "bias_ptr")) is not None:
        inputs["bias"] = tensor_arg(bias, "num_experts", "N")
    return _instance(call, inputs, (rows, top_k, e, n, k))


def whole_scales(a: torch.Tensor | None, b: torch.Tensor | None, experts: int) -> dict[str, TensorArg]:
    """The inputs of a scale for all of A and of one for each expert's matrix; empty if there are others."""
    if a is None or b is None or a.numel() != 1 or b.numel() != experts:
        return {}
    return {"A_scale": tensor_arg(a.reshape(())), "B_scale": tensor_arg(b.reshape(experts), "num_experts")}


def _instance(call: Invocation, inputs: dict[str, TensorArg], sizes: tuple[int, int, int, int, int]) -> KernelInstance:
    a, b, c = (call.tensor(name) for name in ("a_ptr", "b_ptr", "c_ptr"))
    (rows, top_k, e, n, k), chosen = sizes, ("num_rows", "top_k")
    weights, scale = routing_weights(call), call.optional("b_scale_ptr")
    inputs["topk_ids"] = lazy_arg("int32", chosen, lambda: expert_of_rows(call, rows, top_k))
    if weights is not None:
        inputs["topk_weights"] = tensor_arg(weights.reshape(rows, top_k), *chosen)
    whole = "A_scale" in inputs and inputs["A_scale"].shape == ()
    word = f"{'_weighted' if weights is not None else ''}{'_bias' if 'bias' in inputs else ''}"
    word += f"{abbreviate(a.dtype, torch.bfloat16)}{'_per_tensor' if whole else ''}"
    return KernelInstance(
        name=f"moe_gemm{word}_topk{top_k}_e{e}_n{n}_k{k}",
        op_type="moe",
        axes={
            "num_rows": None,
            "num_experts": e,
            "top_k": top_k,
            "N": n,
            "K": k,
            **block_counts(None if whole else scale),
        },
        inputs=inputs,
        outputs={"C": lazy_arg(c.dtype, ("num_rows", "top_k", "N"), lambda: c.reshape(rows, top_k, n))},
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            e=e,
            n=n,
            k=k,
            scales=WHOLE_SCALES if whole else scaling(scale, n, k),
            bias=" + bias[g].to(torch.float32)" if "bias" in inputs else "",
            result="C" if weights is None else WEIGHTED,
            dtype=dtype_name(c.dtype),
        ),
        description="C[i, j] = A[i] @ B[topk_ids[i, j]].T" + (" * topk_weights[i, j]." if weights is not None else "."),
        tags=(f"quantization:{dtype_name(a.dtype)}",) if scale is not None else (),
        flops=lambda: 2 * fused.routed_pairs(_expert_ids(call, rows, top_k), e) * n * k,
        touched=lambda: (
            total_bytes(a, c) + total_bytes(b[:1]) * fused.experts_in_use(_expert_ids(call, rows, top_k), e)
        ),
    )


def routing_weights(call: Invocation) -> torch.Tensor | None:
    """The weights; None if the kernel was compiled not to use them, even if it is passed some."""
    return None if call["MUL_ROUTED_WEIGHT"] is False else call.optional("topk_weights_ptr")


def expert_of_rows(call: Invocation, rows: int, top_k: int) -> torch.Tensor:
    """[rows, top_k], int32, from the experts of blocks and the tokens in each, whose ids count all tokens' experts."""
    experts, tokens = call.tensor("expert_ids_ptr"), call.optional("sorted_token_ids_ptr")
    if experts.is_meta:
        raise Unrecognized("no Sample holds its experts")
    if tokens is None:
        return experts[: rows * top_k].reshape(rows, top_k).to(torch.int32)
    block = block_size(len(tokens), len(experts))
    end = int(call.tensor("num_tokens_post_padded_ptr").item())
    ids = experts.repeat_interleave(block)[:end]
    used_tokens = tokens[:end].to(torch.int64)
    expert_by_pair = torch.full((rows * top_k,), -1, dtype=torch.int32, device=experts.device)
    real = used_tokens < rows * top_k
    expert_by_pair[used_tokens[real]] = ids[real].to(torch.int32)
    return expert_by_pair.reshape(rows, top_k)


def _expert_ids(call: Invocation, rows: int, top_k: int) -> torch.Tensor:
    """The experts of the rows, without data where they were not sampled."""
    if call.tensor("expert_ids_ptr").is_meta:
        return torch.empty((rows, top_k), dtype=torch.int32, device="meta")
    return expert_of_rows(call, rows, top_k)


def block_size(tokens: int, blocks: int) -> int:
    """Tokens in a block, a power of two; the last block of the buffer may be cut."""
    return 1 << (-(-tokens // blocks) - 1).bit_length()


@replay_rule("triton::fused_moe_kernel")
class FusedMoeKernel(ReplayRule):
    """A graph that chooses the experts itself leaves no Sample of them: each token gets other ones, drawn."""

    def chosen_experts(self, bound: BoundCall) -> torch.Tensor | None:
        owners, slots = bound.content("expert_ids_ptr"), bound.content("sorted_token_ids_ptr")
        block = bound["BLOCK_SIZE_M"]
        if owners is None or slots is None or not isinstance(block, int):
            return None
        total = bound.content("num_tokens_post_padded_ptr")
        used_slots = len(slots) if total is None else min(int(total[0]), len(slots))  # the rest is undefined
        slots = slots[: used_slots // block * block].reshape(-1, block)
        filled = (slots < bound.integer("num_valid_tokens")).sum(dim=1)
        owners, count = owners[: len(filled)].to(torch.int64), bound.spec("b_ptr").shape[0]
        used = (owners >= 0) & (owners < count)
        return torch.zeros(count, dtype=torch.int64).index_add_(0, owners[used], filled[: len(owners)][used])

    def prepare(self, bound: BoundCall) -> None:
        experts, written = bound["expert_ids_ptr"], bound["c_ptr"]
        tables = ("expert_ids_ptr", "sorted_token_ids_ptr", "num_tokens_post_padded_ptr")
        sampled = all(bound.content(name) is not None for name in tables if isinstance(bound[name], TensorSpec))
        if not isinstance(experts, TensorSpec) or sampled:
            return
        if not isinstance(written, TensorSpec):
            raise Skip("no Sample holds the experts of its rows, and it has no output that says how many each has")
        valid = bound.integer("num_valid_tokens")
        tokens = written.shape[0] if len(written.shape) == 3 else bound.spec("a_ptr").shape[0]
        count, slots, block = bound.spec("b_ptr").shape[0], bound["sorted_token_ids_ptr"], bound["BLOCK_SIZE_M"]
        if not isinstance(block, int):
            raise Skip("no Sample holds the experts of its rows, nor is the size of its blocks known")
        ids = drawn_experts(bound, tokens, -(-valid // tokens), count).flatten()[:valid]
        if isinstance(slots, TensorSpec) and bound["naive_block_assignment"] is not True:
            order, blocks = align_blocks(ids, count, block, slots.shape[0])
            blocks = blocks[: slots.shape[0] // block]
            bound.set_content("sorted_token_ids_ptr", order)
        else:
            blocks = ids  # a block for each row
        blocks = blocks[: experts.shape[0]]
        padded = torch.nn.functional.pad(blocks, (0, experts.shape[0] - len(blocks)))
        bound.set_content("expert_ids_ptr", padded)
        if isinstance(bound["num_tokens_post_padded_ptr"], TensorSpec):
            bound.set_content("num_tokens_post_padded_ptr", torch.tensor([len(blocks) * block]))

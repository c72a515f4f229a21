"""moe_gemm of weights of 4 or 8 bits: vLLM's Marlin kernel for experts, launched for each of their two matrices.

Tokens are sorted by expert and padded to blocks, as for Triton's kernel (`gemm`), each expert's weight is packed as
`gemm.packed_weight` says. Float weights (MXFP4, NVFP4, float8) are declined: vLLM rearranges their scales further.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.families.gemm.packed_weight import PackedWeight, marlin_weight
from kcap.schemas.derive.families.gemm.weight_only import refuse_elements, set_words, with_elements
from kcap.schemas.derive.families.moe import fused
from kcap.schemas.derive.families.moe.gemm import expert_of_rows
from kcap.schemas.derive.index_arguments import set_zeros
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, total_bytes, written_or_returned
from kcap.schemas.derive.kernel import KernelInstance, lazy_arg, packed_arg, tensor_arg

RUN = """

@torch.no_grad()
def run({inputs}):
    assert B.shape == {shape}
    C = torch.zeros((*topk_ids.shape, {n}), dtype=torch.float32, device=A.device)
    for g in topk_ids.unique().tolist():
        if not 0 <= g < {e}:
            continue
        rows, slots = torch.nonzero(topk_ids == g, as_tuple=True)
        C[rows, slots] = A[rows].to(torch.float32) @ weight({expert})
    return {result}.to(A.dtype)
"""


@family("moe_gemm", "_moe_C::moe_wna16_marlin_gemm")
def marlin_moe_gemm(call: Invocation) -> KernelInstance:
    """`a`: [size_m, K]; `b_q_weight`, `b_scales`, `b_zeros_or_none`: [experts, …]; the result: [size_m * top_k, N]."""
    call.refuse("a_scales", "global_scale", "is_zp_float")
    refuse_elements(call, "g_idx_or_none", "perm_or_none")
    if with_elements(call, "b_bias_or_none") is not None:
        raise Unrecognized("its experts have biases")
    a, b, scale = (call.tensor(name) for name in ("a", "b_q_weight", "b_scales"))
    zero, weights = with_elements(call, "b_zeros_or_none"), call.tensor("topk_weights")
    n, k, top_k = (int(call.number(name)) for name in ("size_n", "size_k", "top_k"))
    kind = int(call.number("b_type_id", "b_q_type_id"))
    packed = marlin_weight(k, n, kind, b[0], scale[0], None if zero is None else zero[0])
    rows, e = int(call.number("size_m")), len(b)
    if a.dtype not in FLOATS or a.shape != (rows, k):
        raise Unrecognized("not rows of floats")
    return _instance(call, packed, (rows, top_k, e), weights if call["mul_topk_weights"] else None)


def _instance(
    call: Invocation, packed: PackedWeight, sizes: tuple[int, int, int], weights: torch.Tensor | None
) -> KernelInstance:
    a, b, zero = call.tensor("a"), call.tensor("b_q_weight"), with_elements(call, "b_zeros_or_none")
    (rows, top_k, e), chosen = sizes, ("num_rows", "top_k")
    ids = _routing(call)
    inputs = {
        "A": tensor_arg(a, "num_rows", "K"),
        "B": packed_arg(b, "num_experts", "B_rows", "B_columns", description="Each expert's W, packed."),
        "B_scale": tensor_arg(call.tensor("b_scales"), "num_experts", "K_group", "N"),
    }
    if zero is not None:
        inputs["B_zero"] = packed_arg(zero, "num_experts", "K_group", "N_packed", description="Zero points, packed.")
    inputs["topk_ids"] = lazy_arg("int32", chosen, lambda: expert_of_rows(ids, rows, top_k))
    if weights is not None:
        inputs["topk_weights"] = tensor_arg(weights.reshape(rows, top_k), *chosen)

    def known_ids() -> torch.Tensor:
        if call.tensor("expert_ids").is_meta:
            return torch.empty((rows, top_k), dtype=torch.int32, device="meta")
        return expert_of_rows(ids, rows, top_k)

    def output() -> torch.Tensor:
        return (
            written_or_returned(call, "c_or_none").reshape(-1, packed.n)[: rows * top_k].reshape(rows, top_k, packed.n)
        )

    return KernelInstance(
        name=f"moe_gemm{'_weighted' if weights is not None else ''}_{packed.name(a.dtype)}_topk{top_k}_e{e}",
        op_type="moe",
        axes={"num_rows": None, "top_k": top_k, "num_experts": e, "K": packed.k, **packed.axes()},
        inputs=inputs,
        outputs={"C": lazy_arg(a.dtype, ("num_rows", "top_k", "N"), output)},
        reference=packed.unpacking()
        + RUN.format(
            inputs=", ".join(inputs),
            shape=tuple(b.shape),
            n=packed.n,
            e=e,
            expert=", ".join(f"{name}[g]" for name in packed.inputs()),
            result="C" if weights is None else "(C * topk_weights[..., None].to(torch.float32))",
        ),
        description=f"C[i, j] = A[i] @ W[topk_ids[i, j]] of W of {packed.bits} bits"
        + (", times topk_weights[i, j]." if weights is not None else "."),
        tags=(f"quantization:int{packed.bits}",),
        flops=lambda: 2 * fused.routed_pairs(known_ids(), e) * packed.n * packed.k,
        touched=lambda: (
            total_bytes(a)
            + rows * top_k * packed.n * a.element_size()
            + total_bytes(b[:1], call.tensor("b_scales")[:1]) * fused.experts_in_use(known_ids(), e)
        ),
    )


def _routing(call: Invocation) -> Invocation:
    """Tokens by expert under the names of Triton's kernel."""
    names = {
        "expert_ids_ptr": "expert_ids",
        "sorted_token_ids_ptr": "sorted_token_ids",
        "num_tokens_post_padded_ptr": "num_tokens_past_padded",
    }
    return Invocation(call.operator, {triton: call.tensor(name) for triton, name in names.items()})


@replay_rule("_moe_C::moe_wna16_marlin_gemm")
class MarlinMoe(ReplayRule):
    """`workspace` holds locks, which are free (zero) before and after."""

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "b_q_weight", "b_zeros_or_none")
        set_zeros(bound, "workspace", "g_idx_or_none", "perm_or_none")

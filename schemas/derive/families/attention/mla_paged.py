"""mla_paged: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged cache, with FlashInfer's names.

Operators of FlashInfer, FlashMLA and vLLM on CPU; FlashAttention is in `flash_attention`, Triton's decodes in
two launches in `split_decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.attention.core import (
    AttentionVariant,
    MakeTensor,
    refuse_quantized,
    refuse_unmodelled_run,
    wrapper_result,
)
from kcap.schemas.derive.families.attention.gqa_paged import attention_outputs, gather_source
from kcap.schemas.derive.families.attention.pages import PagedBatch, last_lengths, listed_pages, table_pages
from kcap.schemas.derive.families.attention.replay_rules import DENSE
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, has_strides
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg

REFERENCE = """import math

import torch

{attend}

@torch.no_grad()
def run({arguments}):
    assert q_nope.shape[1:] == ({h}, {c}) and q_pe.shape[1:] == ({h}, {p})
    assert ckv_cache.shape[1:] == ({ps}, {c}) and kpe_cache.shape[1:] == ({ps}, {p})
    output = torch.zeros(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    lse = torch.full(q_nope.shape[:2], -float("inf"), dtype=torch.float32, device=q_nope.device)
{gather}        ckv = ckv_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        kpe = kpe_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        q = torch.cat((q_nope[rows], q_pe[rows]), dim=-1).to(torch.float32)
        k = torch.cat((ckv, kpe), dim=-1)
        output[rows], lse[rows] = attend(q, k[:, None, :], ckv[:, None, :], sm_scale)
    return {returned}
"""

LATENT_SCALE_DESCRIPTION = "Softmax scale, based on head dimensions before matrix absorption."


@dataclass(frozen=True)
class LatentAttention:
    """An invocation. `q_nope`, `q_pe`: [tokens, heads, dim], `ckv`, `kpe`: [pages, rows of a page, dim].

    `output`: [tokens, heads, dim of ckv], `lse`: base 2, [tokens, heads].
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    ckv: torch.Tensor
    kpe: torch.Tensor
    batch: PagedBatch
    scale: float
    output: MakeTensor
    lse: MakeTensor | None = None
    causal: bool = True


def latent_attention(attention: LatentAttention) -> KernelInstance:
    """A decode or a prefill as a kernel instance."""
    (_, h, c), p, ps = attention.q_nope.shape, attention.q_pe.shape[2], attention.ckv.shape[1]
    refuse_quantized(attention.q_nope, attention.q_pe, attention.ckv, attention.kpe)
    batch, cache = attention.batch, ("num_pages", "page_size")
    inputs = {
        "q_nope": tensor_arg(attention.q_nope, batch.axis, "num_qo_heads", "head_dim_ckv"),
        "q_pe": tensor_arg(attention.q_pe, batch.axis, "num_qo_heads", "head_dim_kpe"),
        "ckv_cache": tensor_arg(attention.ckv, *cache, "head_dim_ckv"),
        "kpe_cache": tensor_arg(attention.kpe, *cache, "head_dim_kpe"),
        **batch.inputs(),
        "sm_scale": scalar_arg(attention.scale, description=LATENT_SCALE_DESCRIPTION),
    }
    variant = AttentionVariant(causal=attention.causal)
    kind = "decode" if batch.decode else "prefill_causal" if attention.causal else "prefill"
    words = ("" if attention.lse else "_nolse") + abbreviate(attention.q_nope.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"mla_paged_{kind}{words}_h{h}_ckv{c}_kpe{p}_ps{ps}",
        op_type="mla_paged",
        axes={"num_qo_heads": h, "head_dim_ckv": c, "head_dim_kpe": p, **batch.axes},
        inputs=inputs,
        outputs=attention_outputs(batch, attention.q_nope.dtype, "head_dim_ckv", attention.output, attention.lse),
        reference=REFERENCE.format(
            attend=AttentionVariant(causal=kind == "prefill_causal").attend_source(),
            arguments=", ".join(inputs),
            gather=gather_source(batch),
            returned="output, lse" if attention.lse else "output",
            h=h,
            c=c,
            p=p,
            ps=ps,
        ),
        description="Batched Multi-head Latent Attention with a paged KV cache.",
        constraints=batch.constraints,
        flops=lambda: 2 * h * (2 * c + p) * variant.pairs(batch.pages.lengths(), batch.queries()),
        touched=lambda: _touched(attention),
        engine_form="latent attention: no form with the engine's table",
    )


def _touched(attention: LatentAttention) -> int:
    """Bytes: rows of padding are neither read nor written."""
    queries, (h, c), p = attention.batch.queries(), attention.q_nope.shape[1:], attention.q_pe.shape[2]
    rows, tokens = attention.batch.pages.rows(queries), int(queries.sum())
    numbers = rows * (c + p) + tokens * h * (2 * c + p)
    return int(numbers * attention.ckv.element_size() + (4 * h * tokens if attention.lse else 0))


@family("mla_paged", "flashinfer::BatchMLAPagedAttentionWrapper")
def flashinfer_mla(call: Invocation) -> KernelInstance:
    """FlashInfer's, of its run together with its plan."""
    refuse_unmodelled_run(call)
    call.refuse("logits_soft_cap", "plan.logits_soft_cap")
    lengths, starts = call.tensor("plan.kv_len_arr"), call.tensor("plan.qo_indptr")
    q, ckv = call.tensor("q_nope"), call.tensor("ckv_cache")
    page_size = ckv.shape[1]

    def lse() -> torch.Tensor:
        lse_returned: torch.Tensor = wrapper_result(call, 1)
        return lse_returned / math.log(2.0) if call["return_lse_base_on_e"] else lse_returned

    indptr, indices = call.tensor("plan.kv_indptr"), call.tensor("plan.kv_indices")
    return latent_attention(
        LatentAttention(
            q_nope=q,
            q_pe=call.tensor("q_pe"),
            ckv=ckv,
            kpe=call.tensor("kpe_cache"),
            batch=PagedBatch(
                tokens=len(q),
                pages=listed_pages(indptr, indices, lambda: last_lengths(lengths, page_size), page_size),
                starts=starts,
                decode=len(q) == len(lengths),
            ),
            scale=float(call.number("plan.sm_scale")),
            output=lambda: wrapper_result(call, 0),
            lse=lse if call["return_lse"] else None,
            causal=bool(call["plan.causal"]),
        )
    )


@family("mla_paged", "_C::mla_decode_kvcache")
def cpu_decode(call: Invocation) -> KernelInstance:
    """vLLM's on CPU: [tokens, heads, latent + rotated], the cache [pages, rows of a page, latent + rotated]."""
    out = call.tensor("out")
    q, cache, lengths = call.tensor("query"), call.tensor("kv_cache"), call.tensor("seq_lens")
    return decode(call, q, cache, out.shape[-1], table_of(call, "block_tables", lengths, q, cache), lambda: out, None)


@family(
    "mla_paged",
    "_flashmla_C::dense_decode_fwd",
    "_flashmla_C::fwd_kvcache_mla",
    "sgl_kernel::dense_decode_fwd",
    "sgl_kernel::fwd_kvcache_mla",
)
def flash_mla(call: Invocation) -> KernelInstance:
    """FlashMLA: [sequences, queries, heads, latent + rotated], as many queries of each; its log-sum-exp is natural.

    Several queries of a sequence (speculated tokens) make a prefill, in which rows of padding are zero.
    """
    renamed = with_dense_names(call)
    renamed.refuse("is_fp8", "indices", "attn_sink", "extra_k_cache", "vcache")
    q, cache = renamed.tensor("q"), renamed.tensor("kcache", "kv_cache")
    if q.dim() != 4 or cache.dim() != 4 or cache.shape[2] != 1:
        raise Unrecognized("it has several heads of keys")
    lengths, (sequences, queries) = renamed.tensor("seqlens_k"), q.shape[:2]
    q, cache = q.flatten(0, 1), cache[:, :, 0]
    batch = table_of(renamed, "block_table", lengths, q, cache)
    if queries > 1:
        starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
        batch = replace(batch, starts=starts, decode=False)

    def without_padding(rows: torch.Tensor, padding: float) -> torch.Tensor:
        has_tokens = (lengths > 0).to(rows.device).reshape(-1, *[1] * (rows.dim() - 1))
        return torch.where(has_tokens, rows, padding).flatten(0, 1)

    def output() -> torch.Tensor:
        return without_padding(call.result[0], 0.0)

    def lse() -> torch.Tensor:
        return without_padding(call.result[1].mT / math.log(2.0), -float("inf"))

    size, causal = int(renamed.number("head_size_v")), bool(renamed["is_causal"])
    return decode(renamed, q, cache, size, batch, output, lse, causal)


def with_dense_names(call: Invocation) -> Invocation:
    """`call` with FlashMLA's names where its schema has none (vLLM 0.22 calls them `_0`, `_1` …)."""
    if "_0" not in call.arguments:
        return call
    return replace(call, arguments=dict(zip(DENSE, call.arguments.values(), strict=False)))


def table_of(call: Invocation, table: str, lengths: torch.Tensor, q: torch.Tensor, cache: torch.Tensor) -> PagedBatch:
    """A decode's batch, from a block table."""
    pages = table_pages(call.tensor(table), lengths, cache.shape[1])
    return PagedBatch(tokens=len(q), pages=pages, starts=None, decode=True)


def decode(
    call: Invocation,
    q: torch.Tensor,
    cache: torch.Tensor,
    latents: int,
    batch: PagedBatch,
    output: MakeTensor,
    lse: MakeTensor | None,
    causal: bool = True,
) -> KernelInstance:
    """A decode over queries and a cache whose last dimension is the latent, then the rotated part."""
    return latent_attention(
        LatentAttention(
            q_nope=q[..., :latents],
            q_pe=q[..., latents:],
            ckv=cache[..., :latents],
            kpe=cache[..., latents:],
            batch=batch,
            scale=float(call.number("softmax_scale", "scale")),
            output=output,
            lse=lse,
            causal=causal,
        )
    )


CONCAT = """import torch


@torch.no_grad()
def run(q_nope, q_pe):
    assert q_nope.shape[1:] == ({h}, {c}) and q_pe.shape[1:] == ({h}, {p})
    return torch.cat((q_nope, q_pe), dim=-1)
"""


@family("mla_concat", "_C_cache_ops::concat_mla_q")
def concat_queries(call: Invocation) -> KernelInstance:
    """Latent attention's queries: [tokens, heads, latent] and [tokens, heads, rotated], into one tensor."""
    nope, pe, out = call.tensor("ql_nope"), call.tensor("q_pe"), call.tensor("q_out")
    if nope.dim() != 3 or {nope.dtype, pe.dtype, out.dtype} - {nope.dtype} or nope.dtype not in FLOATS:
        raise Unrecognized("its parts are of several types")
    (_, h, c), p = nope.shape, pe.shape[2]
    heads = ("num_tokens", "num_qo_heads")
    return KernelInstance(
        name=f"mla_concat{abbreviate(nope.dtype, torch.bfloat16)}_h{h}_ckv{c}_kpe{p}",
        op_type="mla_concat",
        axes={"num_tokens": None, "num_qo_heads": h, "head_dim_ckv": c, "head_dim_kpe": p, "head_dim_qk": c + p},
        inputs={
            "q_nope": tensor_arg(nope, *heads, "head_dim_ckv"),
            "q_pe": tensor_arg(pe, *heads, "head_dim_kpe"),
        },
        outputs={"q": lazy_arg(out.dtype, (*heads, "head_dim_qk"), lambda: out)},
        reference=CONCAT.format(h=h, c=c, p=p),
        description="The latent and the rotated part of queries as one tensor.",
    )


KEYS = """import torch


@torch.no_grad()
def run(k_nope, k_pe):
    assert k_nope.shape[1:] == ({h}, {n}) and k_pe.shape[1:] == (1, {p})
    return torch.cat(({nope}, {pe}.expand(-1, {h}, -1)), dim=-1)
"""


@family(
    "mla_concat",
    "flashinfer::concat_mla_k",
    "sgl_kernel::concat_mla_k",
    "tvm::concat_mla_k",
    "triton::concat_and_cast_mha_k_kernel",
    "triton::concat_and_cast_mha_k_pad_kernel",
)
def concat_keys(call: Invocation) -> KernelInstance:
    """Uncompressed keys: [tokens, heads, dim], and [tokens, 1, rotated] of all heads. Triton's cast, for any dtypes."""
    out, nope, pe = (call.tensor(*names) for names in KEY_NAMES)
    if nope.dim() != 3 or pe.dim() != 3 or {nope.dtype, pe.dtype, out.dtype} - {*FLOATS}:
        raise Unrecognized("its parts are no heads, or quantized")
    (tokens, h, n), p = nope.shape, pe.shape[2]
    if out.shape != (tokens, h, n + p) or pe.shape[:2] != (tokens, 1):
        raise Unrecognized("its keys are of other sizes than its parts")
    if call.base.startswith("triton"):
        require_constants(call, out, nope, pe)
    elif {nope.dtype, pe.dtype} != {out.dtype}:
        raise Unrecognized("its parts are of several types")
    heads = ("num_tokens", "num_qo_heads")
    words = abbreviate(nope.dtype, torch.bfloat16) + abbreviate(pe.dtype, nope.dtype).replace("_", "_kpe_")
    cast = {name: cast_to(name, part.dtype, out.dtype) for name, part in (("k_nope", nope), ("k_pe", pe))}
    return KernelInstance(
        name=f"mla_concat_k{words}{abbreviate(out.dtype, nope.dtype).replace('_', '_to_')}_h{h}_nope{n}_kpe{p}",
        op_type="mla_concat",
        axes={"num_tokens": None, "num_qo_heads": h, "head_dim_nope": n, "head_dim_kpe": p, "head_dim_qk": n + p}
        | {"num_kpe_heads": 1},
        inputs={
            "k_nope": tensor_arg(nope, *heads, "head_dim_nope", description="Keys without their position."),
            "k_pe": tensor_arg(
                pe, "num_tokens", "num_kpe_heads", "head_dim_kpe", description="The same for all heads."
            ),
        },
        outputs={"k": lazy_arg(out.dtype, (*heads, "head_dim_qk"), lambda: out)},
        reference=KEYS.format(h=h, n=n, p=p, nope=cast["k_nope"], pe=cast["k_pe"]),
        description="The parts of keys without and with their position as one tensor.",
    )


KEY_NAMES = (("k", "k_ptr", "arg0"), ("k_nope", "k_nope_ptr", "arg1"), ("k_rope", "k_rope_ptr", "arg2"))


def cast_to(name: str, dtype: torch.dtype, target: torch.dtype) -> str:
    return name if dtype == target else f"{name}.to({target})"


def require_constants(call: Invocation, out: torch.Tensor, nope: torch.Tensor, pe: torch.Tensor) -> None:
    """Unrecognized unless the Triton kernel's constants are those of these tensors."""
    sizes = tuple(call[name] for name in ("head_cnt", "nope_dim", "rope_dim"))
    laid_out = (
        has_strides(out, call["k_stride0"], call["k_stride1"], 1),
        has_strides(nope, call["nope_stride0"], call["nope_stride1"], 1),
        has_strides(pe, call["rope_stride0"], None, 1),
    )
    if sizes != (*nope.shape[1:], pe.shape[2]) or not all(laid_out):
        raise Unrecognized("its constants are not those of its tensors")


cost_function("mla_concat")(CostInputs.whole)

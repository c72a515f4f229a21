"""gqa_ragged and mla_ragged: attention over keys and values without a cache; attention_extend: over those behind it.

Operators of the first are FlashInfer's wrapper and aten's attention, which encoders use. mla_ragged is for values of
another size than the keys. FlashAttention without a page table is ragged, too; gqa_paged.py recognizes its operators.
aten's under a mask that is an argument is in masked.py.

attention_extend is SGLang's Triton prefill: of each sequence a list of slots of the cache, and new keys beside it, of
which FlashInfer has no form. Of latent attention it is mla_ragged, where nothing is cached: the cache holds latents. A
kernel of the same name without a cache, which its vision encoders use, is ragged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.attention.core import (
    CAUSAL,
    LSE_DESCRIPTION,
    PREFILL,
    SCALE_DESCRIPTION,
    AttentionVariant,
    MakeTensor,
    first_key_seen,
    planned_softcap,
    planned_softmax_scale,
    planned_window,
    refuse_quantized,
    refuse_unless_one,
    refuse_unmodelled_run,
    refuse_unmodelled_slots,
    wrapper_result,
)
from kcap.schemas.derive.families.attention.cost import cached_bytes
from kcap.schemas.derive.families.attention.masked import masked_attention
from kcap.schemas.derive.families.attention.pages import PagedBatch, listed_slots
from kcap.schemas.derive.invocation import Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, scalar_arg, tensor_arg

HEAD = """import math

import torch

{attend}

@torch.no_grad()
def run({arguments}):
    assert q.shape[1:] == ({h}, {d})
    assert k.shape[1:] == ({kv}, {d}) and v.shape[1:] == ({kv}, {vo})
    output = torch.zeros((q.shape[0], {h}, {vo}), dtype=q.dtype, device=q.device)
"""
REFERENCE = (
    HEAD
    + """    lse = torch.full(q.shape[:2], -float("inf"), dtype=torch.float32, device=q.device)
    for b in range(qo_indptr.shape[0] - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        keys = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        q_b, k_b, v_b = q[rows].to(torch.float32), k[keys].to(torch.float32), v[keys].to(torch.float32)
        output[rows], lse[rows] = attend(q_b, k_b, v_b, sm_scale{more})
    return {returned}
"""
)


@dataclass(frozen=True)
class RaggedAttention:
    """An invocation. `q`: [tokens, heads, dim], `k`, `v`: [keys, kv heads, dim].

    `starts`, `kv_starts`: where each sequence's queries and keys begin, [sequences + 1]. `output`: [tokens, heads,
    dim], `lse`: base 2, [tokens, heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    kv_starts: torch.Tensor | None
    scale: float
    output: MakeTensor
    lse: MakeTensor | None = None
    variant: AttentionVariant = CAUSAL

    def qo_indptr(self) -> torch.Tensor:
        return self._all(self.starts, self.q)

    def kv_indptr(self) -> torch.Tensor:
        if self.kv_starts is None:
            raise Unrecognized("it does not say where each sequence's keys begin")
        return self._all(self.kv_starts, self.k)

    def _all(self, starts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if int(require_values(starts, "sequence starts")[-1]) != len(rows):
            raise Unrecognized("its sequences are padded")
        return starts.to(torch.int32)


def ragged_attention(attention: RaggedAttention) -> KernelInstance:
    """A prefill as a kernel instance."""
    (_, h, d), (_, kv, vo) = attention.q.shape, attention.v.shape
    refuse_quantized(attention.q, attention.k, attention.v)
    if attention.kv_starts is None:
        raise Unrecognized("it does not say where each sequence's keys begin")
    kind, qk_axis, vo_axis = ("gqa", "head_dim", "head_dim") if d == vo else ("mla", "qk_dim", "vo_dim")
    dims = f"_d{d}" if d == vo else f"_qk{d}_vo{vo}"
    heads = f"_h{h}_kv{kv}" if d == vo or h != kv else f"_h{h}"
    variant, inputs = attention.variant, _inputs(attention, qk_axis, vo_axis)
    properties = ("_causal" if variant.causal else "") + variant.words
    properties += ("" if attention.lse else "_nolse") + abbreviate(attention.q.dtype, torch.bfloat16)
    consts = {"num_qo_heads": h, "num_kv_heads": kv, qk_axis: d, vo_axis: vo}
    shape = ("total_q", "num_qo_heads", vo_axis)
    outputs = {"output": lazy_arg(attention.q.dtype, shape, attention.output)}
    if attention.lse is not None:
        outputs["lse"] = lazy_arg("float32", shape[:2], attention.lse, LSE_DESCRIPTION)
    return KernelInstance(
        name=f"{kind}_ragged_prefill{properties}{heads}{dims}",
        op_type=f"{kind}_ragged",
        axes={**consts, "total_q": None, "total_kv": None, "len_indptr": None},
        inputs=inputs,
        outputs=outputs,
        reference=REFERENCE.format(
            attend=variant.attend_source(),
            arguments=", ".join(inputs),
            more=variant.arguments,
            returned="output, lse" if attention.lse else "output",
            h=h,
            kv=kv,
            d=d,
            vo=vo,
        ),
        description="Batched Grouped Query Attention prefill with ragged (variable-length) inputs.",
        constraints=("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"),
        flops=lambda: _flops(attention, h, d + vo),
        touched=lambda: _touched(attention),
        engine_form=PREFILL,
    )


def _inputs(attention: RaggedAttention, qk_axis: str, vo_axis: str) -> dict[str, TensorArg]:
    return {
        "q": tensor_arg(attention.q, "total_q", "num_qo_heads", qk_axis),
        "k": tensor_arg(attention.k, "total_kv", "num_kv_heads", qk_axis),
        "v": tensor_arg(attention.v, "total_kv", "num_kv_heads", vo_axis),
        "qo_indptr": lazy_arg("int32", ("len_indptr",), attention.qo_indptr, "Query offsets for each sequence."),
        "kv_indptr": lazy_arg("int32", ("len_indptr",), attention.kv_indptr, "Key-value offsets for each sequence."),
        "sm_scale": scalar_arg(attention.scale, description=SCALE_DESCRIPTION),
        **attention.variant.inputs(),
    }


def _flops(attention: RaggedAttention, heads: int, dims: int) -> int:
    queries, keys = attention.qo_indptr().diff(), attention.kv_indptr().diff()
    return 2 * heads * dims * attention.variant.pairs(keys, queries)


def _touched(attention: RaggedAttention) -> int:
    """Bytes: of the keys and values only those that a query sees."""
    queries, keys = attention.qo_indptr().diff(), attention.kv_indptr().diff()
    rows = int((keys - first_key_seen(keys, queries, attention.variant.window)).sum())
    (tokens, h, d), (_, kv, vo) = attention.q.shape, attention.v.shape
    numbers = (kv * rows + h * tokens) * (d + vo)
    moved = numbers * attention.q.element_size() + (4 * h * tokens if attention.lse else 0)
    return int(moved) + total_bytes(*(arg.value for arg in attention.variant.inputs().values()))


@family("gqa_ragged", "flashinfer::BatchPrefillWithRaggedKVCacheWrapper")
def flashinfer_ragged(call: Invocation) -> KernelInstance:
    """FlashInfer's, of its run together with its plan; its log-sum-exp has base 2 already."""
    refuse_unmodelled_run(call)
    call.refuse("plan.v_indptr", "plan.o_indptr")
    q = call.tensor("q")
    return ragged_attention(
        RaggedAttention(
            q=q,
            k=call.tensor("k"),
            v=call.tensor("v"),
            starts=call.tensor("plan.qo_indptr"),
            kv_starts=call.tensor("plan.kv_indptr"),
            scale=planned_softmax_scale(call, q.shape[-1]),
            output=lambda: wrapper_result(call, 0),
            lse=(lambda: wrapper_result(call, 1)) if call["return_lse"] else None,
            variant=AttentionVariant(
                causal=bool(call["plan.causal"]),
                window=planned_window(call),
                softcap=planned_softcap(call),
            ),
        )
    )


@family("gqa_ragged", "aten::scaled_dot_product_attention")
def scaled_dot_product_attention(call: Invocation) -> KernelInstance:
    """aten's, [batch, heads, tokens, dim]: sequences of one length. Its causal mask counts from the first key."""
    call.refuse("dropout_p")
    q, k, v = call.tensor("query"), call.tensor("key"), call.tensor("value")
    if q.dim() != 4 or (call["is_causal"] and q.shape[2] != k.shape[2]):
        raise Unrecognized("no batch of heads, or a causal mask that begins at the first key")
    if q.shape[0] != k.shape[0] or (q.shape[1] != k.shape[1] and not call["enable_gqa"]):
        raise Unrecognized("keys are broadcast")
    scale = q.shape[-1] ** -0.5 if call["scale"] is None else float(call.number("scale"))
    if call["attn_mask"] is not None:
        return replace(masked_attention(call, q, k, v, scale), family="attention_masked")
    return ragged_attention(
        RaggedAttention(
            q=join_batches(q),
            k=join_batches(k),
            v=join_batches(v),
            starts=sequence_starts(q),
            kv_starts=sequence_starts(k),
            scale=scale,
            output=lambda: join_batches(call.result),
            variant=AttentionVariant(causal=bool(call["is_causal"])),
        )
    )


def join_batches(heads: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, dim] as [batch · tokens, heads, dim]."""
    return heads.transpose(1, 2).flatten(0, 1)


def sequence_starts(heads: torch.Tensor) -> torch.Tensor:
    """Where each sequence of [batch, heads, tokens, dim] begins, once they are joined."""
    return torch.arange(heads.shape[0] + 1, dtype=torch.int32) * heads.shape[2]


EXTEND = (
    HEAD
    + """    for b in range(qo_indptr.shape[0] - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        if rows.start == rows.stop:
            continue
        k_b = torch.cat((k_cache[pages, 0], k[rows])).to(torch.float32)
        v_b = torch.cat((v_cache[pages, 0], v[rows])).to(torch.float32)
        output[rows], _ = attend(q[rows].to(torch.float32), k_b, v_b, sm_scale{more})
    return output
"""
)

CACHED = ("num_pages", "page_size", "num_kv_heads")
QUERIES = ("total_q", "num_qo_heads")
NEW_KEYS = ("total_q", "num_kv_heads")
SWITCHES = (
    *("USE_CUSTOM_MASK", "STORE_LSE", "SKIP_PREFIX", "SKIP_EXTEND"),
    *("IDENTITY_KV_INDICES", "USE_FP8_PREFIX", "USE_FP8_EXTEND"),
)


@family("attention_extend", "triton::_fwd_kernel")
def extend(call: Invocation) -> KernelInstance:
    """`Q_Extend`: [tokens, heads, dim], `K_Extend`, `V_Extend`: [tokens, kv heads, dim], buffers: [slots, kv heads,
    dim]."""
    if "B_Seqlen" in call.arguments:
        return replace(without_cache(call), family="gqa_ragged")
    refuse_unmodelled_slots(call, *SWITCHES)
    refuse_unless_one(call, "k_scale", "v_scale")
    q, k, v = (call.tensor(f"{name}_Extend") for name in "QKV")
    k_cache, v_cache = call.tensor("K_Buffer")[:, None], call.tensor("V_Buffer")[:, None]
    refuse_quantized(q, k, v, k_cache, v_cache)
    window, causal = int(call.number("SLIDING_WINDOW_SIZE")), bool(call["IS_CAUSAL"])
    if window > 0 and not causal:
        raise Unrecognized("what its window hides after a query differs between releases")
    variant = AttentionVariant(
        causal=causal,
        window=window if window > 0 else -1,
        softcap=max(float(call.number("logit_cap")), 0.0),
        sinks=call.optional("sink_ptr"),
    )
    if k_cache.shape[2:] != k.shape[1:] and not call.tensor("kv_indices").numel():  # it has latents, which none reads
        starts, output = call.tensor("qo_indptr"), partial(call.tensor, "O_Extend")
        scale = float(call.number("sm_scale"))
        return ragged_attention(RaggedAttention(q, k, v, starts, starts, scale, output, variant=variant))
    (_, h, d), (_, kv, vo) = q.shape, v.shape
    pages = listed_slots(call.tensor("kv_indptr"), call.tensor("kv_indices"))
    batch = PagedBatch(len(q), pages, call.tensor("qo_indptr"), decode=False)
    inputs = {
        "q": tensor_arg(q, *QUERIES, "qk_dim"),
        "k": tensor_arg(k, *NEW_KEYS, "qk_dim", description="The keys of the queries' own tokens."),
        "v": tensor_arg(v, *NEW_KEYS, "vo_dim", description="The values of the queries' own tokens."),
        "k_cache": tensor_arg(k_cache, *CACHED, "qk_dim"),
        "v_cache": tensor_arg(v_cache, *CACHED, "vo_dim"),
        **batch.inputs(),
        "sm_scale": scalar_arg(call.number("sm_scale"), description=SCALE_DESCRIPTION),
        **variant.inputs(),
    }
    words = ("_causal" if causal else "") + variant.words + abbreviate(q.dtype, torch.bfloat16)
    sizes = {"num_qo_heads": h, "num_kv_heads": kv, "qk_dim": d, "vo_dim": vo}
    return KernelInstance(
        name=f"attention_extend{words}_h{h}_kv{kv}_qk{d}_vo{vo}",
        op_type="attention_extend",
        axes={**sizes, **batch.axes},
        inputs=inputs,
        outputs={"output": lazy_arg(q.dtype, (*QUERIES, "vo_dim"), lambda: call.tensor("O_Extend"))},
        reference=EXTEND.format(
            attend=variant.attend_source(),
            arguments=", ".join(inputs),
            more=variant.arguments,
            h=h,
            kv=kv,
            d=d,
            vo=vo,
        ),
        description="A prefill: what is cached of each sequence, then its new keys.",
        constraints=batch.constraints,
        flops=lambda: 2 * h * (d + vo) * variant.pairs(pages.lengths() + batch.queries(), batch.queries()),
        touched=lambda: total_bytes(q, k, v, call.tensor("O_Extend")) + cached_bytes(pages, k_cache, v_cache),
        engine_form=PREFILL,
    )


OF_VLLM = ("B_Loc", "K_cache", "SLIDING_WINDOW_Q", "Sinks")


def without_cache(call: Invocation) -> KernelInstance:
    """SGLang's `context_attention_fwd`. `Q`: [tokens, heads, dim], `K`, `V`: [tokens, kv heads, dim], `B_Seqlen`:
    [sequences], `B_Start_Loc`: where they begin, and maybe where the last one ends. vLLM's kernels of that name take
    other scales, windows, sinks or a cache."""
    if any(name in call.arguments for name in OF_VLLM):
        raise Unrecognized("it is vLLM's")
    q, lengths, starts = call.tensor("Q"), call.tensor("B_Seqlen"), call.tensor("B_Start_Loc")
    ends = starts[: len(lengths)] + lengths
    if not starts.is_meta and not torch.equal(ends[:-1], starts[1 : len(lengths)]):
        raise Unrecognized("its sequences have gaps between them")
    starts = torch.cat([starts[:1], ends])
    return ragged_attention(
        RaggedAttention(
            q=q,
            k=call.tensor("K"),
            v=call.tensor("V"),
            starts=starts,
            kv_starts=starts,
            scale=float(call.number("sm_scale")),
            output=partial(call.tensor, "Out"),
            variant=AttentionVariant(causal=bool(call["IS_CAUSAL"])),
        )
    )

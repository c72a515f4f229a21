"""gqa_paged: attention of grouped queries over a paged cache, by operators of vLLM and FlashInfer.

An operator that returns no log-sum-exp gets a Definition without `lse`, with `nolse` in its name. Rows of
padding, which operators leave as they were, are zero as in the reference.

A decode has a second Definition, gqa_table_decode, whose inputs are what the engine itself passes: its table of pages
and the sequences' lengths. A kernel for that can take the operator's place without anything computed before it.

The 3D path of vLLM's Triton kernel (segments, then their reduction) is left out. Other decodes of two launches are in
`split_decode`; SGLang's prefill, which reads old keys from the cache and new ones from beside it, in `gqa_ragged`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kcap.schemas.derive.families import family
from kcap.schemas.derive.families.attention.core import (
    CAUSAL,
    LSE_DESCRIPTION,
    PREFILL,
    SCALE_DESCRIPTION,
    AttentionVariant,
    MakeTensor,
    planned_softcap,
    planned_softmax_scale,
    planned_window,
    refuse_quantized,
    refuse_unless_one,
    refuse_unmodelled_run,
    wrapper_kv_cache,
    wrapper_result,
)
from kcap.schemas.derive.families.attention.pages import PagedBatch, PageTable, listed_pages, table_pages
from kcap.schemas.derive.families.cache.cpu_cache import TILED, may_be_tiled, unpacked_caches
from kcap.schemas.derive.invocation import Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import (
    KernelInstance,
    OperatorFacts,
    TensorArg,
    abbreviate,
    lazy_arg,
    scalar_arg,
    tensor_arg,
)

GATHER = """    for b in range(kv_indptr.shape[0] - 1):
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        rows = {rows}
        if len(pages) == 0 or rows.start == rows.stop:
            continue
        num_kv = {num_kv}
"""

TABLE_GATHER = """    for b, num_kv in enumerate(seq_lens.tolist()):
        pages, rows = block_table[b, : -(-num_kv // {ps})].long(), slice(b, b + 1)
        if num_kv == 0:
            continue
"""

REFERENCE = """import math

import torch

{attend}

@torch.no_grad()
def run({arguments}):
    assert q.shape[1:] == ({h}, {d})
    assert k_cache.shape[1:] == v_cache.shape[1:] == ({ps}, {kv}, {d})
    output = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -float("inf"), dtype=torch.float32, device=q.device)
{gather}        k = k_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        v = v_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        output[rows], lse[rows] = attend(q[rows].to(torch.float32), k, v, sm_scale{more})
    return {returned}
"""

CACHE_AXES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
TABLE_DESCRIPTION = "Pages of each sequence in their order. What its length does not reach may be anything, -1 too."
LENGTHS_DESCRIPTION = "Tokens of each sequence; 0: a row of padding, whose output is 0."
NATURAL_LSE_DESCRIPTION = "The natural log-sum-exp of attention logits; minus infinity in padding."

LISTED = "its list of pages is planned on the host"
NOT_ONE_QUERY = "a padded prefill has the same arguments"
SINKS_LSE = "sinks: what its log-sum-exp is beside them is not documented"


@dataclass(frozen=True)
class PagedAttention:
    """One invocation. `q`: [tokens, heads, dim], `k`, `v`: [pages, rows of a page, kv heads, dim].

    `output`: [tokens, heads, dim], `lse`: base 2, [tokens, heads]. `table`: of a decode; or why it has none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: PagedBatch
    scale: float
    output: MakeTensor
    lse: MakeTensor | None = None
    variant: AttentionVariant = CAUSAL
    table: PageTable | str | None = None


def paged_attention(attention: PagedAttention) -> KernelInstance:
    """A decode or a prefill as a kernel instance."""
    refuse_quantized(attention.q, attention.k, attention.v)
    if attention.k.shape != attention.v.shape or attention.q.shape[2] != attention.k.shape[3]:
        raise Unrecognized("its values have a size of their own")
    batch = attention.batch
    form = _Form(
        kind="paged_decode" if batch.decode else "paged_prefill",
        indices=batch.inputs(),
        axes=batch.axes,
        constraints=batch.constraints,
        gather=gather_source(batch),
        outputs=attention_outputs(batch, attention.q.dtype, "head_dim", attention.output, attention.lse),
        lse="lse",
    )
    return replace(_instance(attention, form), engine_form=_engine_form(attention))


def _engine_form(attention: PagedAttention) -> KernelInstance | str | None:
    """The same with the engine's own arguments, or why there is no such form."""
    batch, table = attention.batch, attention.table
    if not batch.decode:
        return PREFILL
    if not isinstance(table, PageTable):
        return table
    rows, lse = "batch_size", table.lse
    outputs = attention_outputs(batch, attention.q.dtype, "head_dim", attention.output, None)
    if lse is not None:
        outputs["lse"] = lazy_arg(
            "float32",
            ("num_qo_heads", rows),
            lambda: batch.without_padding(lse().T, -float("inf")).T,
            NATURAL_LSE_DESCRIPTION,
        )
    form = _Form(
        kind="table_decode",
        indices={
            "block_table": lazy_arg(
                table.pages.dtype, (rows, "max_pages"), lambda: table.reached(batch), TABLE_DESCRIPTION
            ),
            "seq_lens": tensor_arg(table.lengths, rows, description=LENGTHS_DESCRIPTION),
        },
        axes={rows: None, "num_pages": None, "page_size": batch.pages.page_size, "max_pages": None},
        constraints=(),
        gather=TABLE_GATHER.format(ps=batch.pages.page_size),
        outputs=outputs,
        lse="(lse * math.log(2.0)).T.contiguous()",
    )
    return replace(_instance(attention, form), operator=replace(table.operator, lengths="seq_lens"))


@dataclass(frozen=True)
class _Form:
    """In which a Definition has the batch: `gather` is the head of its reference's loop over sequences, `lse` what that
    returns as log-sum-exp."""

    kind: str
    indices: dict[str, TensorArg]
    axes: dict[str, int | None]
    constraints: tuple[str, ...]
    gather: str
    outputs: dict[str, TensorArg]
    lse: str


def _instance(attention: PagedAttention, form: _Form) -> KernelInstance:
    (_, h, d), (ps, kv) = attention.q.shape, attention.k.shape[1:3]
    batch, variant = attention.batch, attention.variant
    if batch.decode:  # its one query stands at the last key
        variant = replace(variant, causal=False, right=-1)
    inputs = {
        "q": tensor_arg(attention.q, batch.axis, "num_qo_heads", "head_dim"),
        "k_cache": tensor_arg(attention.k, *CACHE_AXES),
    }
    inputs |= {"v_cache": tensor_arg(attention.v, *CACHE_AXES), **form.indices}
    inputs |= {"sm_scale": scalar_arg(attention.scale, description=SCALE_DESCRIPTION), **variant.inputs()}
    words = ("_causal" if variant.causal else "") + variant.words
    words += ("" if "lse" in form.outputs else "_nolse") + abbreviate(attention.q.dtype, torch.bfloat16)
    text = REFERENCE.format(
        attend=variant.attend_source(),
        arguments=", ".join(inputs),
        more=variant.arguments,
        gather=form.gather,
        returned=f"output, {form.lse}" if "lse" in form.outputs else "output",
        h=h,
        kv=kv,
        d=d,
        ps=ps,
    )
    return KernelInstance(
        name=f"gqa_{form.kind}{words}_h{h}_kv{kv}_d{d}_ps{ps}",
        op_type="gqa_paged",
        axes={"num_qo_heads": h, "num_kv_heads": kv, "head_dim": d, **form.axes},
        inputs=inputs,
        outputs=form.outputs,
        reference=text,
        description=f"Batched Grouped Query Attention {form.kind.rpartition('_')[2]} with a paged KV cache.",
        constraints=form.constraints,
        flops=lambda: 4 * h * d * attention.variant.pairs(batch.pages.lengths(), batch.queries()),
        touched=lambda: _touched(attention),
    )


def _touched(attention: PagedAttention) -> int:
    """Bytes: rows of padding are neither read nor written."""
    queries, (h, d), kv = attention.batch.queries(), attention.q.shape[1:], attention.k.shape[2]
    rows, tokens = attention.batch.pages.rows(queries, attention.variant.window), int(queries.sum())
    moved = 2 * (kv * rows + h * tokens) * d * attention.q.element_size() + (4 * h * tokens if attention.lse else 0)
    return int(moved) + total_bytes(*(arg.value for arg in attention.variant.inputs().values()))


def gather_source(batch: PagedBatch) -> str:
    """The head of the loop over sequences: which pages, rows of queries and tokens each has."""
    page_size = batch.pages.page_size
    return GATHER.format(
        rows="slice(b, b + 1)" if batch.decode else "slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))",
        num_kv=f"(len(pages) - 1) * {page_size} + int(kv_last_page_len[b])" if page_size > 1 else "len(pages)",
    )


def attention_outputs(
    batch: PagedBatch, dtype: torch.dtype, dim: str, output: MakeTensor, lse: MakeTensor | None
) -> dict[str, TensorArg]:
    """`output` [tokens, heads, dim] and, if there is one, `lse` [tokens, heads]."""
    shape = (batch.axis, "num_qo_heads", dim)
    outputs = {"output": lazy_arg(dtype, shape, lambda: batch.without_padding(output(), 0.0))}
    if lse is not None:
        outputs["lse"] = lazy_arg(
            "float32", shape[:2], lambda: batch.without_padding(lse(), -float("inf")), LSE_DESCRIPTION
        )
    return outputs


@family("gqa_paged", "_C::cpu_attention_with_kv_cache")
def cpu_attention(call: Invocation) -> KernelInstance:
    """vLLM's on CPU. Its window counts the query's own key. The layout of the caches is read from the metadata."""
    call.refuse("dynamic_causal")
    q, lengths, window = call.tensor("query"), call.tensor("seq_lens"), int(call.number("sliding_window_size"))
    k, v = unpacked_caches(call.tensor("key_cache"), call.tensor("value_cache"), call.optional("scheduler_metadata"))
    table = PageTable(call.tensor("block_table"), lengths, OperatorFacts(hints=("scheduler_metadata",)))
    return paged_attention(
        PagedAttention(
            q=q,
            k=k,
            v=v,
            batch=PagedBatch(
                tokens=len(q),
                pages=table_pages(table.pages, lengths, k.shape[1]),
                starts=call.tensor("query_start_loc"),
                decode=len(q) == len(lengths),  # none is padded: each sequence has a query
            ),
            table=TILED if may_be_tiled(k) else table,
            scale=float(call.number("scale")),
            output=lambda: call.tensor("output"),
            variant=AttentionVariant(
                causal=bool(call["causal"]),
                window=window - 1 if window > 0 else -1,
                softcap=float(call.number("softcap")) if call["softcap"] else 0.0,
                sinks=call.optional("s_aux"),
                alibi_slopes=call.optional("alibi_slopes"),
            ),
        )
    )


@family("gqa_paged", "flashinfer::BatchDecodeWithPagedKVCacheWrapper")
def flashinfer_decode(call: Invocation) -> KernelInstance:
    return _wrapped(call, "plan.indptr", "plan.indices", "plan.last_page_len", None)


@family("gqa_paged", "flashinfer::BatchPrefillWithPagedKVCacheWrapper")
def flashinfer_prefill(call: Invocation) -> KernelInstance:
    names = ("plan.paged_kv_indptr", "plan.paged_kv_indices", "plan.paged_kv_last_page_len")
    return _wrapped(call, *names, call.tensor("plan.qo_indptr"))


def _wrapped(call: Invocation, indptr: str, indices: str, last: str, starts: torch.Tensor | None) -> KernelInstance:
    """A FlashInfer wrapper's run with its plan; its log-sum-exp has base 2 already."""
    refuse_unmodelled_run(call)
    (k, v), q, lasts = wrapper_kv_cache(call), call.tensor("q"), call.tensor(last)
    attention = PagedAttention(
        q=q,
        k=k,
        v=v,
        batch=PagedBatch(
            tokens=len(q),
            pages=listed_pages(call.tensor(indptr), call.tensor(indices), lambda: lasts, k.shape[1]),
            starts=starts,
            decode=starts is None,
        ),
        table=LISTED,
        scale=planned_softmax_scale(call, q.shape[-1]),
        output=lambda: wrapper_result(call, 0),
        lse=(lambda: wrapper_result(call, 1)) if call["return_lse"] else None,
        variant=AttentionVariant(
            causal=starts is None or bool(call["plan.causal"]),
            window=planned_window(call),
            softcap=planned_softcap(call),
        ),
    )
    return paged_attention(attention)


UNMODELLED_BY_TRITON = (
    *("USE_ALIBI_SQRT", "USE_QQ_BIAS", "USE_MM_PREFIX", "USE_FP8", "IS_3D", "KV_QUANT_MODE", "Q_IS_FP8"),
)


@family("gqa_paged", "triton::kernel_unified_attention", "triton::kernel_unified_attention_2d")
def unified_attention(call: Invocation) -> KernelInstance:
    """Causal; its window counts the query's own key, and 0 is none."""
    call.refuse(*UNMODELLED_BY_TRITON)
    refuse_unless_one(call, "out_scale")
    if call["CHUNK_LOOKBACK"] not in (None, -1):
        raise Unrecognized("it attends in chunks")
    q, k, lengths = call.tensor("query_ptr"), call.tensor("key_cache_ptr"), call.tensor("seq_lens_ptr")
    batch = PagedBatch(
        tokens=len(q),
        pages=table_pages(call.tensor("block_tables_ptr"), lengths, k.shape[1]),
        starts=call.tensor("query_start_len_ptr"),
        decode=len(q) == len(lengths),
    )
    return paged_attention(
        PagedAttention(
            q=q,
            k=k,
            v=call.tensor("value_cache_ptr"),
            batch=batch,
            table=NOT_ONE_QUERY,
            scale=float(call.number("scale")),
            output=lambda: call.tensor("output_ptr").view(q.shape),
            variant=AttentionVariant(
                window=int(call.number("SLIDING_WINDOW")) - 1,
                softcap=float(call.number("softcap")) if call["USE_SOFTCAP"] else 0.0,
                sinks=call.tensor("sink_ptr") if call["USE_SINKS"] else None,
                alibi_slopes=call.tensor("alibi_slopes_ptr") if call["USE_ALIBI_SLOPES"] else None,
            ),
        )
    )

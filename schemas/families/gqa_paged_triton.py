"""gqa_paged in Triton: vLLM's unified attention, where one launch is the whole of it.

Left out are the launches of which two are one kernel: its 3D path (segments, then their reduction) and SGLang's decode
(`_fwd_grouped_kernel_stage1`, `_fwd_kernel_stage2`). SGLang's extension reads old keys from the cache and new ones
beside it, which FlashInfer has no form for.
"""

from __future__ import annotations

from kcap.schemas.families import family
from kcap.schemas.families.attention import refuse_unless_one
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.families.paged import Paged, paged
from kcap.schemas.families.pages import Batch, table_pages

UNMODELLED = (
    *("USE_ALIBI_SLOPES", "USE_ALIBI_SQRT", "USE_QQ_BIAS", "USE_SOFTCAP", "USE_SINKS", "USE_MM_PREFIX", "USE_FP8"),
    *("IS_3D", "KV_QUANT_MODE", "Q_IS_FP8"),
)


@family("gqa_paged", "triton::kernel_unified_attention", "triton::kernel_unified_attention_2d")
def unified_attention(call: Invocation) -> Form:
    """Causal; its window counts the query's own key, and 0 is none."""
    call.refuse(*UNMODELLED)
    refuse_unless_one(call, "out_scale")
    if call["CHUNK_LOOKBACK"] not in (None, -1):
        raise Unrecognized("it attends in chunks")
    q, k, lengths = call.tensor("query_ptr"), call.tensor("key_cache_ptr"), call.tensor("seq_lens_ptr")
    batch = Batch(
        tokens=len(q),
        pages=table_pages(call.tensor("block_tables_ptr"), lengths, k.shape[1]),
        starts=call.tensor("query_start_len_ptr"),
        decode=len(q) == len(lengths),
    )
    return paged(
        Paged(
            q=q,
            k=k,
            v=call.tensor("value_cache_ptr"),
            batch=batch,
            scale=float(call.number("scale")),
            output=lambda: call.tensor("output_ptr").view(q.shape),
            window=int(call.number("SLIDING_WINDOW")) - 1,
        )
    )

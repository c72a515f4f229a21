"""Grouped-query attention over a paged key-value cache as FlashInfer-Bench has it: an invocation, and its Form.

An operator that returns no log-sum-exp makes a Definition without `lse`, which says `nolse` in its name. Rows of
padding, which operators leave as they were, are zero as in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.families.attention import LSE, SCALE, Make, attend, pairs, refuse_quantized
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of, scalar
from kcap.schemas.families.invocation import Unrecognized
from kcap.schemas.families.pages import Batch

GATHER = """    for b in range(kv_indptr.shape[0] - 1):
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        rows = {rows}
        if len(pages) == 0 or rows.start == rows.stop:
            continue
        num_kv = {num_kv}
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
        output[rows], lse[rows] = attend(q[rows].to(torch.float32), k, v, sm_scale)
    return {returned}
"""
CACHE = ("num_pages", "page_size", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Paged:
    """An invocation. `q`: [tokens, heads, dim], `k`, `v`: [pages, rows of a page, kv heads, dim].

    `window`: keys before its own that a query sees, -1: all. `output`: [tokens, heads, dim], `lse`: base 2, [tokens,
    heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: Batch
    scale: float
    output: Make
    lse: Make | None = None
    causal: bool = True
    window: int = -1


def paged(one: Paged) -> Form:
    """The Form of a decode or a prefill."""
    (_, h, d), (ps, kv) = one.q.shape, one.k.shape[1:3]
    refuse_quantized(one.q, one.k, one.v)
    if one.k.shape != one.v.shape or d != one.k.shape[3]:
        raise Unrecognized("its values have a size of their own")
    batch = one.batch
    inputs = {"q": of(one.q, batch.axis, "num_qo_heads", "head_dim"), "k_cache": of(one.k, *CACHE)}
    inputs |= {"v_cache": of(one.v, *CACHE), **batch.inputs()}
    inputs["sm_scale"] = scalar(one.scale, description=SCALE)
    causal = "_causal" if one.causal and not batch.decode else ""
    words = causal + (f"_window{one.window}" if one.window >= 0 else "")
    words += ("" if one.lse else "_nolse") + abbreviate(one.q.dtype, torch.bfloat16)
    kind = "decode" if batch.decode else "prefill"
    text = REFERENCE.format(
        attend=attend(bool(causal), one.window),
        arguments=", ".join(inputs),
        gather=gather(batch),
        returned="output, lse" if one.lse else "output",
        h=h,
        kv=kv,
        d=d,
        ps=ps,
    )
    return Form(
        name=f"gqa_paged_{kind}{words}_h{h}_kv{kv}_d{d}_ps{ps}",
        op_type="gqa_paged",
        axes={"num_qo_heads": h, "num_kv_heads": kv, "head_dim": d, **batch.axes},
        inputs=inputs,
        outputs=outputs(batch, one.q.dtype, "head_dim", one.output, one.lse),
        reference=text,
        description=f"Batched Grouped Query Attention {kind} with a paged KV cache.",
        constraints=batch.constraints,
        flops=lambda: 4 * h * d * pairs(batch.pages.lengths(), batch.queries(), one.causal, one.window),
        touched=lambda: _touched(one),
    )


def _touched(one: Paged) -> int:
    """Bytes: rows of padding are neither read nor written."""
    queries, (h, d), kv = one.batch.queries(), one.q.shape[1:], one.k.shape[2]
    rows, tokens = one.batch.pages.rows(queries, one.window), int(queries.sum())
    return int(2 * (kv * rows + h * tokens) * d * one.q.element_size() + (4 * h * tokens if one.lse else 0))


def gather(batch: Batch) -> str:
    """The head of the loop over sequences: which pages, rows of queries and tokens each has."""
    page_size = batch.pages.page_size
    return GATHER.format(
        rows="slice(b, b + 1)" if batch.decode else "slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))",
        num_kv=f"(len(pages) - 1) * {page_size} + int(kv_last_page_len[b])" if page_size > 1 else "len(pages)",
    )


def outputs(batch: Batch, dtype: torch.dtype, dim: str, output: Make, lse: Make | None) -> dict[str, Slot]:
    """`output` [tokens, heads, dim] and, if there is one, `lse` [tokens, heads]."""
    shape = (batch.axis, "num_qo_heads", dim)
    found = {"output": made(dtype, shape, lambda: batch.without_padding(output(), 0.0))}
    if lse is not None:
        found["lse"] = made("float32", shape[:2], lambda: batch.without_padding(lse(), -float("inf")), LSE)
    return found

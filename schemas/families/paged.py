"""Attention over a paged key-value cache as FlashInfer-Bench has it: what an operator was given, and its Form.

A batch with one query a sequence is a decode, any other a prefill (mixed batches too). An operator that returns no
log-sum-exp makes a Definition without `lse`, which says `nolse` in its name. Rows of padding, that a CUDA graph's batch
ends with and operators leave as they were, are zero as in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.families.attention import Make, Pages, attend, known, pairs
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of, scalar
from kcap.schemas.families.invocation import Unrecognized

REFERENCE = """import math

import torch

{attend}

@torch.no_grad()
def run({arguments}):
    assert q.shape[1:] == ({h}, {d})
    assert k_cache.shape[1:] == v_cache.shape[1:] == ({ps}, {kv}, {d})
    output = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -float("inf"), dtype=torch.float32, device=q.device)
    for b in range(kv_indptr.shape[0] - 1):
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        rows = {rows}
        if len(pages) == 0 or rows.start == rows.stop:
            continue
        num_kv = {num_kv}
        k = k_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        v = v_cache[pages].flatten(0, 1)[:num_kv].to(torch.float32)
        output[rows], lse[rows] = attend(q[rows].to(torch.float32), k, v, sm_scale)
    return {returned}
"""
CACHE = ("num_pages", "page_size", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Paged:
    """An invocation. `q`: [tokens, heads, dim], `k`, `v`: [pages, rows of a page, kv heads, dim].

    `starts`: where each sequence's queries begin, [sequences + 1]; a decode may have none. `window`: keys before its
    own that a query sees, -1: all. `output`: [tokens, heads, dim], `lse`: base 2, [tokens, heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: Pages
    starts: torch.Tensor | None
    decode: bool
    scale: float
    output: Make
    lse: Make | None = None
    causal: bool = True
    window: int = -1

    def queries(self) -> torch.Tensor:
        """Queries of each sequence."""
        return self.used().long() if self.decode else self.qo_indptr().diff()

    def used(self) -> torch.Tensor:
        """Of each sequence, whether it has tokens: the others are padding."""
        return self.pages.lengths() > 0

    def qo_indptr(self) -> torch.Tensor:
        """`starts`; Unrecognized where it leaves rows of padding, which a prefill's Definition does not know."""
        if self.starts is None or int(known(self.starts, "query starts")[-1]) != len(self.q):
            raise Unrecognized("its queries are padded")
        return self.starts.to(torch.int32)

    def kv_indptr(self) -> torch.Tensor:
        """Where each sequence's pages begin; Unrecognized for a decode in which a sequence has not one query."""
        if self.decode and self.starts is not None:
            rows = torch.arange(len(self.q), device=self.starts.device)
            if bool(((known(self.starts, "query starts")[:-1] != rows) & self.used()).any()):
                raise Unrecognized("a sequence of its decode has not one query")
        return self.pages.indptr()

    def without_padding(self, rows: torch.Tensor, padding: float) -> torch.Tensor:
        """A decode's `rows` [tokens, …] with `padding` in those of sequences without tokens."""
        if not self.decode:
            return rows
        return torch.where(self.used().to(rows.device).reshape(-1, *[1] * (rows.dim() - 1)), rows, padding)


def paged(one: Paged) -> Form:
    """The Form of a decode or a prefill."""
    (tokens, h, d), (ps, kv) = one.q.shape, one.k.shape[1:3]
    if one.k.shape != one.v.shape or one.k.dtype != one.q.dtype or one.v.dtype != one.q.dtype or d != one.k.shape[3]:
        raise Unrecognized("its caches are quantized, or its values have a size of their own")
    axis = "batch_size" if one.decode else "total_q"
    axes: dict[str, int | None] = {axis: None, "num_qo_heads": h, "num_kv_heads": kv, "head_dim": d, "page_size": ps}
    axes |= {"num_pages": None, "len_indptr": None, "num_kv_indices": None}
    axes |= {"batch_size": None} if ps > 1 else {}
    inputs, shape = _inputs(one, axis, ps), (axis, "num_qo_heads", "head_dim")
    outputs = {"output": made(one.q.dtype, shape, lambda: one.without_padding(one.output(), 0.0))}
    if (lse := one.lse) is not None:
        text = "The 2-based log-sum-exp of attention logits."
        outputs["lse"] = made("float32", shape[:2], lambda: one.without_padding(lse(), -float("inf")), text)
    return Form(
        name=f"gqa_paged_{_properties(one)}{abbreviate(one.q.dtype, torch.bfloat16)}_h{h}_kv{kv}_d{d}_ps{ps}",
        op_type="gqa_paged",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=_reference(one, list(inputs), h, kv, d, ps),
        description=f"Batched Grouped Query Attention {'decode' if one.decode else 'prefill'} with a paged KV cache.",
        constraints=(
            "len_indptr == batch_size + 1" if one.decode else "total_q == qo_indptr[-1].item()",
            "num_kv_indices == kv_indptr[-1].item()",
        ),
        flops=lambda: 4 * h * d * pairs(one.pages.lengths(), one.queries(), one.causal, one.window),
        touched=lambda: (2 * kv * int(one.pages.lengths().sum()) + 2 * h * tokens) * d * one.q.element_size(),
    )


def _properties(one: Paged) -> str:
    word = "decode" if one.decode else "prefill_causal" if one.causal else "prefill"
    return word + (f"_window{one.window}" if one.window >= 0 else "") + ("_nolse" if one.lse is None else "")


def _inputs(one: Paged, axis: str, page_size: int) -> dict[str, Slot]:
    pages = one.pages
    inputs = {"q": of(one.q, axis, "num_qo_heads", "head_dim"), "k_cache": of(one.k, *CACHE)}
    inputs["v_cache"] = of(one.v, *CACHE)
    if not one.decode:
        inputs["qo_indptr"] = made("int32", ("len_indptr",), one.qo_indptr, "Query offsets for each sequence.")
    inputs["kv_indptr"] = made("int32", ("len_indptr",), one.kv_indptr, "KV page offsets for each sequence.")
    inputs["kv_indices"] = made("int32", ("num_kv_indices",), pages.indices, "Page IDs for KV cache lookups.")
    if page_size > 1:
        text = "Number of valid tokens in the last page of each sequence."
        inputs["kv_last_page_len"] = made("int32", ("batch_size",), pages.last, text)
    inputs["sm_scale"] = scalar(one.scale, description="Softmax scale. Default is (1/sqrt(head_dim)).")
    return inputs


def _reference(one: Paged, arguments: list[str], h: int, kv: int, d: int, ps: int) -> str:
    rows = "slice(b, b + 1)" if one.decode else "slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))"
    return REFERENCE.format(
        attend=attend(one.causal and not one.decode, one.window),
        arguments=", ".join(arguments),
        rows=rows,
        num_kv=f"(len(pages) - 1) * {ps} + int(kv_last_page_len[b])" if ps > 1 else "len(pages)",
        returned="output, lse" if one.lse is not None else "output",
        h=h,
        kv=kv,
        d=d,
        ps=ps,
    )

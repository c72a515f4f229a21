"""Attention over keys and values as they come, joined without a cache: what an operator was given, and its Form.

FlashInfer-Bench's gqa_ragged, and its mla_ragged where values have a size of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.families.attention import LSE, SCALE, Make, attend, first_seen, known, pairs, refuse_quantized
from kcap.schemas.families.form import Form, Slot, abbreviate, made, of, scalar
from kcap.schemas.families.invocation import Unrecognized

REFERENCE = """import math

import torch

{attend}

@torch.no_grad()
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    assert q.shape[1:] == ({h}, {d})
    assert k.shape[1:] == ({kv}, {d}) and v.shape[1:] == ({kv}, {vo})
    output = torch.zeros((q.shape[0], {h}, {vo}), dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -float("inf"), dtype=torch.float32, device=q.device)
    for b in range(qo_indptr.shape[0] - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        keys = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        q_b, k_b, v_b = q[rows].to(torch.float32), k[keys].to(torch.float32), v[keys].to(torch.float32)
        output[rows], lse[rows] = attend(q_b, k_b, v_b, sm_scale)
    return {returned}
"""


@dataclass(frozen=True)
class Ragged:
    """An invocation. `q`: [tokens, heads, dim], `k`, `v`: [keys, kv heads, dim].

    `starts`, `kv_starts`: where each sequence's queries and keys begin, [sequences + 1]. `window`: keys before its own
    that a query sees, -1: all. `output`: [tokens, heads, dim], `lse`: base 2, [tokens, heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    kv_starts: torch.Tensor | None
    scale: float
    output: Make
    lse: Make | None = None
    causal: bool = True
    window: int = -1

    def qo_indptr(self) -> torch.Tensor:
        return self._all(self.starts, self.q)

    def kv_indptr(self) -> torch.Tensor:
        if self.kv_starts is None:
            raise Unrecognized("it does not say where each sequence's keys begin")
        return self._all(self.kv_starts, self.k)

    def _all(self, starts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if int(known(starts, "sequence starts")[-1]) != len(rows):
            raise Unrecognized("its sequences are padded")
        return starts.to(torch.int32)


def ragged(one: Ragged) -> Form:
    """The Form of a prefill."""
    (_, h, d), (_, kv, vo) = one.q.shape, one.v.shape
    refuse_quantized(one.q, one.k, one.v)
    if one.kv_starts is None:
        raise Unrecognized("no one says where its keys begin")
    kind, qk_axis, vo_axis = ("gqa", "head_dim", "head_dim") if d == vo else ("mla", "qk_dim", "vo_dim")
    dims = f"_d{d}" if d == vo else f"_qk{d}_vo{vo}"
    heads = f"_h{h}_kv{kv}" if d == vo or h != kv else f"_h{h}"
    properties = ("_causal" if one.causal else "") + (f"_window{one.window}" if one.window >= 0 else "")
    properties += ("" if one.lse else "_nolse") + abbreviate(one.q.dtype, torch.bfloat16)
    consts = {"num_qo_heads": h, "num_kv_heads": kv, qk_axis: d, vo_axis: vo}
    shape = ("total_q", "num_qo_heads", vo_axis)
    outputs = {"output": made(one.q.dtype, shape, one.output)}
    if one.lse is not None:
        outputs["lse"] = made("float32", shape[:2], one.lse, LSE)
    return Form(
        name=f"{kind}_ragged_prefill{properties}{heads}{dims}",
        op_type=f"{kind}_ragged",
        axes={**consts, "total_q": None, "total_kv": None, "len_indptr": None},
        inputs=_inputs(one, qk_axis, vo_axis),
        outputs=outputs,
        reference=REFERENCE.format(
            attend=attend(one.causal, one.window),
            returned="output, lse" if one.lse else "output",
            h=h,
            kv=kv,
            d=d,
            vo=vo,
        ),
        description="Batched Grouped Query Attention prefill with ragged (variable-length) inputs.",
        constraints=("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"),
        flops=lambda: _flops(one, h, d + vo),
        touched=lambda: _touched(one),
    )


def _inputs(one: Ragged, qk_axis: str, vo_axis: str) -> dict[str, Slot]:
    return {
        "q": of(one.q, "total_q", "num_qo_heads", qk_axis),
        "k": of(one.k, "total_kv", "num_kv_heads", qk_axis),
        "v": of(one.v, "total_kv", "num_kv_heads", vo_axis),
        "qo_indptr": made("int32", ("len_indptr",), one.qo_indptr, "Query offsets for each sequence."),
        "kv_indptr": made("int32", ("len_indptr",), one.kv_indptr, "Key-value offsets for each sequence."),
        "sm_scale": scalar(one.scale, description=SCALE),
    }


def _flops(one: Ragged, heads: int, dims: int) -> int:
    queries, keys = one.qo_indptr().diff(), one.kv_indptr().diff()
    return 2 * heads * dims * pairs(keys, queries, one.causal, one.window)


def _touched(one: Ragged) -> int:
    """Bytes: of the keys and values only those that a query sees."""
    queries, keys = one.qo_indptr().diff(), one.kv_indptr().diff()
    rows = int((keys - first_seen(keys, queries, one.window)).sum())
    (tokens, h, d), (_, kv, vo) = one.q.shape, one.v.shape
    numbers = (kv * rows + h * tokens) * (d + vo)
    return int(numbers * one.q.element_size() + (4 * h * tokens if one.lse else 0))

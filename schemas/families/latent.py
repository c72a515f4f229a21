"""Latent attention over a paged cache as FlashInfer-Bench has it: an invocation, and its Form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.families.attention import Make, attend, pairs, refuse_quantized
from kcap.schemas.families.form import Form, abbreviate, of, scalar
from kcap.schemas.families.paged import gather, outputs
from kcap.schemas.families.pages import Batch

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
SCALE = "Softmax scale, based on head dimensions before matrix absorption."


@dataclass(frozen=True)
class Latent:
    """An invocation. `q_nope`, `q_pe`: [tokens, heads, dim], `ckv`, `kpe`: [pages, rows of a page, dim].

    `output`: [tokens, heads, dim of ckv], `lse`: base 2, [tokens, heads].
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    ckv: torch.Tensor
    kpe: torch.Tensor
    batch: Batch
    scale: float
    output: Make
    lse: Make | None = None
    causal: bool = True


def latent(one: Latent) -> Form:
    """The Form of a decode or a prefill."""
    (_, h, c), p, ps = one.q_nope.shape, one.q_pe.shape[2], one.ckv.shape[1]
    refuse_quantized(one.q_nope, one.q_pe, one.ckv, one.kpe)
    batch, cache = one.batch, ("num_pages", "page_size")
    inputs = {
        "q_nope": of(one.q_nope, batch.axis, "num_qo_heads", "head_dim_ckv"),
        "q_pe": of(one.q_pe, batch.axis, "num_qo_heads", "head_dim_kpe"),
        "ckv_cache": of(one.ckv, *cache, "head_dim_ckv"),
        "kpe_cache": of(one.kpe, *cache, "head_dim_kpe"),
        **batch.inputs(),
        "sm_scale": scalar(one.scale, description=SCALE),
    }
    kind = "decode" if batch.decode else "prefill_causal" if one.causal else "prefill"
    words = ("" if one.lse else "_nolse") + abbreviate(one.q_nope.dtype, torch.bfloat16)
    return Form(
        name=f"mla_paged_{kind}{words}_h{h}_ckv{c}_kpe{p}_ps{ps}",
        op_type="mla_paged",
        axes={"num_qo_heads": h, "head_dim_ckv": c, "head_dim_kpe": p, **batch.axes},
        inputs=inputs,
        outputs=outputs(batch, one.q_nope.dtype, "head_dim_ckv", one.output, one.lse),
        reference=REFERENCE.format(
            attend=attend(kind == "prefill_causal", -1),
            arguments=", ".join(inputs),
            gather=gather(batch),
            returned="output, lse" if one.lse else "output",
            h=h,
            c=c,
            p=p,
            ps=ps,
        ),
        description="Batched Multi-head Latent Attention with a paged KV cache.",
        constraints=batch.constraints,
        flops=lambda: 2 * h * (2 * c + p) * pairs(batch.pages.lengths(), batch.queries(), one.causal, -1),
        touched=lambda: _touched(one),
    )


def _touched(one: Latent) -> int:
    """Bytes: rows of padding are neither read nor written."""
    queries, (h, c), p = one.batch.queries(), one.q_nope.shape[1:], one.q_pe.shape[2]
    rows, tokens = one.batch.pages.rows(queries), int(queries.sum())
    numbers = rows * (c + p) + tokens * h * (2 * c + p)
    return int(numbers * one.ckv.element_size() + (4 * h * tokens if one.lse else 0))

"""The kernels of TVM's paged cache (tvm.relax.frontend.nn.llm.kv_cache, apache-tvm 0.27).

`pages`: [pages, keys and values, kv heads, rows of a page, head dim]. `page_table_indptr`, `page_table_values` are
FlashInfer's kv_indptr and kv_indices; `length_info` the tokens in each last page, or with a sliding window [3,
sequences]. Log-sum-exps have base 2; of a row without keys TVM's is very low where the reference's is minus infinity.
"""

from __future__ import annotations

import functools

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.families.attention.core import AttentionVariant
from kcap.schemas.derive.families.attention.gqa_paged import PagedAttention, paged_attention
from kcap.schemas.derive.families.attention.gqa_ragged import RaggedAttention, ragged_attention
from kcap.schemas.derive.families.attention.pages import PagedBatch, listed_pages
from kcap.schemas.derive.families.cache.update import SLOTS_DESCRIPTION, Pair, update_instance
from kcap.schemas.derive.index_arguments import renumber_densely, renumber_slots, shrink_caches
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, tensor_arg

NO_KEYS = -4e4  # log-sum-exps below it are of no key


def caches_of(call: Invocation) -> Pair:
    """Keys and values: [pages, rows of a page, kv heads, head dim]."""
    pages = call.tensor("pages")
    return pages[:, 0].transpose(1, 2), pages[:, 1].transpose(1, 2)


@family("cache_update", "tvm::transpose_append_mha")
def append(call: Invocation) -> KernelInstance:
    slots = tensor_arg(call.tensor("position_map"), "num_tokens", description=SLOTS_DESCRIPTION)
    return update_instance(call, lambda: caches_of(call), slots)


@family("gqa_paged", "tvm::attention_decode")
def decode(call: Invocation) -> KernelInstance:
    return attention_over_pages(call, None)


@family("gqa_paged", "tvm::attention_prefill")
def prefill(call: Invocation) -> KernelInstance:
    return attention_over_pages(call, call.tensor("q_indptr"))


def attention_over_pages(call: Invocation, starts: torch.Tensor | None) -> KernelInstance:
    call.refuse("rotary_mode")
    q, last, (k, v) = call.tensor("q"), call.tensor("length_info"), caches_of(call)
    if last.dim() != 1:
        raise Unrecognized("its window slides")
    indptr, values = call.tensor("page_table_indptr"), call.tensor("page_table_values")
    return paged_attention(
        PagedAttention(
            q=q,
            k=k,
            v=v,
            batch=PagedBatch(
                tokens=len(q),
                pages=listed_pages(indptr, values, lambda: last, k.shape[1]),
                starts=starts,
                decode=starts is None,
            ),
            scale=float(call.number("sm_scale")),
            output=lambda: call.tensor("output"),
            lse=lambda: log_sum_exp(call),
            variant=AttentionVariant(causal=starts is None or bool(call["causal"])),
        )
    )


@family("gqa_ragged", "tvm::attention_prefill_ragged")
def prefill_ragged(call: Invocation) -> KernelInstance:
    """The new tokens' own keys; what is in the cache before them is attended to apart, and merged."""
    call.refuse("rotary_mode")
    return ragged_attention(
        RaggedAttention(
            q=call.tensor("q"),
            k=call.tensor("k"),
            v=call.tensor("v"),
            starts=call.tensor("q_indptr"),
            kv_starts=call.tensor("kv_indptr"),
            scale=float(call.number("sm_scale")),
            output=lambda: call.tensor("output"),
            lse=lambda: log_sum_exp(call),
            variant=AttentionVariant(causal=bool(call["causal"])),
        )
    )


def log_sum_exp(call: Invocation) -> torch.Tensor:
    lse = call.tensor("lse")
    return torch.where(lse < NO_KEYS, -float("inf"), lse)


MERGE_REFERENCE = """import torch


@torch.no_grad()
def run(v, s, v_other, s_other):
    assert v.shape[1:] == ({h}, {d})
    top = torch.maximum(s, s_other)
    a, b = torch.exp2(s - top), torch.exp2(s_other - top)
    merged = (v.to(torch.float32) * a[..., None] + v_other.to(torch.float32) * b[..., None]) / (a + b)[..., None]
    return merged.to(v.dtype), torch.log2(a + b) + top
"""


@family("attention_merge", "tvm::merge_inplace")
def merge(call: Invocation) -> KernelInstance:
    """`v`, `v_other`: [tokens, heads, head dim], `s`, `s_other`: log-sum-exps of base 2, [tokens, heads]."""
    v, s = call.tensor("v"), call.tensor("s")
    h, d = v.shape[1:]
    rows = ("num_tokens", "num_qo_heads", "head_dim")
    shapes = {"v": rows, "s": rows[:2], "v_other": rows, "s_other": rows[:2]}
    return KernelInstance(
        name=f"attention_merge_base2{abbreviate(v.dtype, torch.bfloat16)}_h{h}_d{d}",
        op_type="attention_merge",
        axes={"num_tokens": None, "num_qo_heads": h, "head_dim": d},
        inputs={name: tensor_arg(call.tensor(name), *shape) for name, shape in shapes.items()},
        outputs={
            "v_out": lazy_arg(v.dtype, rows, lambda: call.tensor("v")),
            "s_out": lazy_arg(s.dtype, rows[:2], lambda: call.tensor("s")),
        },
        reference=MERGE_REFERENCE.format(h=h, d=d),
        description="Attention over two sets of keys, merged in place by their log-sum-exps of base 2.",
    )


ROPE_REFERENCE = """import torch


@torch.no_grad()
def run(qkv, position_map):
    assert qkv.shape[1:] == ({both}, {d})
    q, k, v = qkv.split([{h}, {kv}, {kv}], dim=1)
{rotated}    return q.contiguous(), k.contiguous(), v.contiguous()
"""
ROTATED = """    exponents = torch.arange(0, {d}, 2, device=qkv.device, dtype=torch.float32) / {d}
    angles = position_map.to(torch.float32)[:, None] * {scale!r} / ({theta!r} ** exponents)
    cos, sin = torch.cat((angles, angles), dim=1)[:, None].cos(), torch.cat((angles, angles), dim=1)[:, None].sin()
    q, k = (rotate(x.to(torch.float32), cos, sin).to(qkv.dtype) for x in (q, k))
"""
ROTATE = """

def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin
"""


@family("rope", "tvm::split_rotary")
def split_rotary(call: Invocation) -> KernelInstance:
    """Rotates whole heads by halves. How its frequencies are scaled beyond a factor is compiled in, and not known."""
    qkv, q, k = call.tensor("qkv"), call.tensor("q"), call.tensor("k")
    tokens, (both, d), h, kv = len(qkv), qkv.shape[1:], q.shape[1], k.shape[1]
    if both != h + 2 * kv or q.dim() != 3 or d % 2:
        raise Unrecognized("its heads are not those of queries, keys and values")
    rotates = bool(call.number("apply_rope"))
    theta, scale = (float(call.number(name)) if rotates else 0.0 for name in ("rope_theta", "rope_scale"))
    words = (f"_theta{theta:g}" + (f"_scale{scale:g}" if scale != 1 else "")) if rotates else "_split"
    axes = {"q": h, "k": kv, "v": kv}
    outputs: dict[str, TensorArg] = {}
    for name in axes:
        heads = "num_qo_heads" if name == "q" else "num_kv_heads"
        outputs[name] = lazy_arg(qkv.dtype, ("num_tokens", heads, "head_size"), functools.partial(call.tensor, name))
    reference = ROPE_REFERENCE.format(
        both=both, d=d, h=h, kv=kv, rotated=ROTATED.format(d=d, scale=scale, theta=theta) if rotates else ""
    )
    return KernelInstance(
        name=f"split_rope{abbreviate(qkv.dtype, torch.bfloat16)}{words}_h{h}_kv{kv}_d{d}",
        op_type="rope",
        axes={"num_tokens": None, "num_heads": both, "num_qo_heads": h, "num_kv_heads": kv, "head_size": d},
        inputs={
            "qkv": tensor_arg(qkv, "num_tokens", "num_heads", "head_size"),
            "position_map": tensor_arg(call.tensor("position_map"), "num_tokens"),
        },
        outputs=outputs,
        reference=reference + (ROTATE if rotates else ""),
        description="Queries, keys and values are split, queries and keys rotated by their positions.",
        tags=("fused",),
        flops=3 * tokens * (h + kv) * d if rotates else 0,
    )


@replay_rule("tvm::transpose_append_mha")
class Append(ReplayRule):
    """Without recorded slots each token has one of its own."""

    idempotent_writes = ("pages",)

    def prepare(self, bound: BoundCall) -> None:
        slots, page_size = bound.content("position_map"), bound.spec("pages").shape[3]
        if slots is None:
            slots = torch.arange(bound.spec("position_map").numel)
        dense, pages = renumber_slots(slots, page_size)
        bound.set_content("position_map", dense)
        shrink_caches(bound, self.idempotent_writes, pages)

    def touched(self, bound: BoundCall, total: int) -> int:
        cache = bound.spec("pages")
        unwritten = max(cache.shape[0] * cache.shape[3] - bound.spec("position_map").numel, 0)
        return total - unwritten * cache.numel * cache.bits // 8 // max(cache.shape[0] * cache.shape[3], 1)


@replay_rule("tvm::attention_decode", "tvm::attention_prefill")
class OverPages(ReplayRule):
    """The pages that the table names, renumbered densely."""

    def prepare(self, bound: BoundCall) -> None:
        values = bound.content("page_table_values")
        if values is None or bound.content("page_table_indptr") is None or bound.content("length_info") is None:
            raise Skip("no Sample holds its page table and lengths")
        dense, pages = renumber_densely(values)
        bound.set_content("page_table_values", dense)
        shrink_caches(bound, ("pages",), pages)

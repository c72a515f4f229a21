"""Attention in several launches, each a Definition of its own: what lies between them is in no other.

attention_split and attention_split_merge are vLLM's Triton decode over a paged cache (Flash-Decoding): the keys of each
sequence are split in equal parts; the first launch attends within each, the second merges them by their log-sum-exps.
Latent attention (DeepSeek's) has one head of keys, of which the values are the first part. `_fwd_kernel_stage1`, where
each head of queries has keys of its own, is left out: it rounds each product.

attention_merge merges two sets of keys likewise (FlashInfer, arXiv:2501.01005, section 2.2): a prompt's own keys and
what is cached before it, a shared prefix and the rest. mla_concat joins the two parts of latent attention's queries.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule
from kcap.schemas.derive.families.attention.core import CAP, SCALE_DESCRIPTION, refuse_quantized
from kcap.schemas.derive.families.attention.replay_rules import use_dense_pages, use_dense_slots
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg

SPLIT = """import torch


@torch.no_grad()
def run(q, k_cache, v_cache, block_table, seq_lens, partial, sm_scale):
    assert k_cache.shape[1:] == ({ps}, {kv}, {d}) and v_cache.shape[1:] == ({ps}, {kv}, {vo})
    partial_out = partial.clone(memory_format=torch.contiguous_format)
    for b, length in enumerate(seq_lens.tolist()):
        pages, size = block_table[b, : -(-length // {ps})].long(), -(-length // {s})
        k, v = (cache[pages].flatten(0, 1)[:length].to(torch.float32) for cache in (k_cache, v_cache))
        k, v = k.repeat_interleave({h} // {kv}, dim=1), v.repeat_interleave({h} // {kv}, dim=1)
        logits = torch.einsum("hd,khd->hk", q[b].to(torch.float32), k) * sm_scale
{cap}        for split, start in enumerate(range(0, length, max(size, 1))):
            end = min(start + size, length)
            partial_out[b, :, split, :{vo}], partial_out[b, :, split, {vo}] = attend(logits[:, start:end], v[start:end])
    return partial_out


def attend(logits, v):
    # In the kernel's order, {block} keys at once, whose weights are rounded to the type of the cache: the results are
    # float32, and would show where they are not.
    top, total, output = logits.new_full(logits.shape[:1], -float("inf")), 0.0, 0.0
    for keys in range(0, logits.shape[1], {block}):
        part = logits[:, keys : keys + {block}]
        new_top = torch.maximum(top, part.amax(-1))
        weights, fade = torch.exp(part - new_top[:, None]), torch.exp(top - new_top)
        rounded = weights.to({dtype}).to(torch.float32)
        output = output * fade[:, None] + torch.einsum("hk,khd->hd", rounded, v[keys : keys + {block}])
        top, total = new_top, total * fade + weights.sum(-1)
    return output / total[:, None], top + torch.log(total)
"""

SPLIT_MERGE = """import torch


@torch.no_grad()
def run(partial, seq_lens):
    assert partial.shape[1:] == ({h}, {s}, {vo} + 1)
    size = -(-seq_lens // {s})
    split = torch.arange({s}, device=seq_lens.device)
    used = (split[None, :] * size[:, None] < seq_lens[:, None])[:, None, :]
    lses = partial[..., {vo}].masked_fill(~used, -float("inf"))
    lse = torch.logsumexp(lses, dim=-1)
    share = torch.where(used, (lses - lse[..., None]).exp(), 0.0)[..., None]
    output = torch.where(share > 0, partial[..., :{vo}] * share, 0.0).sum(2)
    return output.to(torch.{dtype}), lse.to(torch.{lse})
"""

PARTIAL = ("batch_size", "num_qo_heads", "num_splits", "partial_size")
PARTIAL_DESCRIPTION = "Of each part of the keys the output, then its natural log-sum-exp; an empty part has none."
CACHE = ("num_pages", "page_size", "num_kv_heads")
CONSTRAINTS = ("partial_size == vo_dim + 1",)


@family("attention_split", "triton::_fwd_grouped_kernel_stage1")
def split(call: Invocation) -> KernelInstance:
    """`Q`: [sequences, heads, dim], buffers: [pages, rows of a page, kv heads, dim], `Att_Out`: [sequences, heads,
    splits, dim of values + 1]."""
    q, partial, lengths = call.tensor("Q"), call.tensor("Att_Out"), call.tensor("B_Seqlen")
    k, v, table = call.tensor("K_Buffer"), call.tensor("V_Buffer"), call.tensor("Req_to_tokens")
    refuse_quantized(q, k, v)
    cap, block = float(call.number("logit_cap")), int(call.number("BLOCK_N"))
    if block < 1 or k.dim() != 4 or v.dim() != 4 or partial.dim() != 4 or call["PAGE_SIZE"] != k.shape[1]:
        raise Unrecognized("its buffers are not paged, or its constants are not known")
    (_, h, d), (ps, kv), vo, s = q.shape, k.shape[1:3], v.shape[3], partial.shape[2]
    rows = {"batch_size": None, "num_pages": None, "max_num_reqs": None, "max_num_pages": None}
    words = f"_softcap{cap:g}" * (cap > 0) + abbreviate(q.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"attention_split{words}_h{h}_kv{kv}_qk{d}_vo{vo}_ps{ps}_s{s}",
        op_type="attention_split",
        axes={
            "num_qo_heads": h,
            "num_kv_heads": kv,
            "qk_dim": d,
            "vo_dim": vo,
            "page_size": ps,
            "num_splits": s,
            "partial_size": vo + 1,
            **rows,
        },
        inputs={
            "q": tensor_arg(q, "batch_size", "num_qo_heads", "qk_dim"),
            "k_cache": tensor_arg(k, *CACHE, "qk_dim"),
            "v_cache": tensor_arg(v, *CACHE, "vo_dim"),
            "block_table": tensor_arg(table, "max_num_reqs", "max_num_pages"),
            "seq_lens": tensor_arg(lengths, "batch_size"),
            "partial": tensor_arg(partial, *PARTIAL, description="What is there before."),
            "sm_scale": scalar_arg(call.number("sm_scale"), description=SCALE_DESCRIPTION),
        },
        outputs={"partial_out": lazy_arg(partial.dtype, PARTIAL, lambda: partial, PARTIAL_DESCRIPTION)},
        reference=SPLIT.format(
            h=h,
            kv=kv,
            d=d,
            vo=vo,
            ps=ps,
            s=s,
            block=block,
            dtype=v.dtype,
            cap=CAP.format(softcap=cap) if cap > 0 else "",
        ),
        description="A decode over a paged cache within parts of each sequence's keys.",
        constraints=CONSTRAINTS,
        flops=lambda: 2 * h * (d + vo) * int(require_values(lengths, "sequence lengths").sum()),
    )


@family("attention_split_merge", "triton::_fwd_kernel_stage2")
def merge_splits(call: Invocation) -> KernelInstance:
    """`Mid_O`: what `attention_split` wrote, `o`: [sequences, heads, dim], `lse`: [sequences, heads], natural."""
    call.refuse("OUTPUT_FP16")
    partial, out, lse, lengths = (call.tensor(name) for name in ("Mid_O", "o", "lse", "B_Seqlen"))
    if partial.dim() != 4 or out.dim() != 3 or partial.shape[3] != out.shape[2] + 1 or out.dtype not in FLOATS:
        raise Unrecognized("its parts are not of its output's size")
    (_, h, s, _), vo = partial.shape, out.shape[2]

    def used(rows: torch.Tensor, padding: float) -> torch.Tensor:
        has_tokens = (lengths > 0).to(rows.device).reshape(-1, *[1] * (rows.dim() - 1))
        return torch.where(has_tokens, rows, padding)

    heads = ("batch_size", "num_qo_heads")
    return KernelInstance(
        name=f"attention_split_merge{abbreviate(out.dtype, torch.bfloat16)}_h{h}_vo{vo}_s{s}",
        op_type="attention_split_merge",
        axes={"batch_size": None, "num_qo_heads": h, "num_splits": s, "vo_dim": vo, "partial_size": vo + 1},
        inputs={
            "partial": tensor_arg(partial, *PARTIAL, description=PARTIAL_DESCRIPTION),
            "seq_lens": tensor_arg(lengths, "batch_size"),
        },
        outputs={
            "output": lazy_arg(out.dtype, (*heads, "vo_dim"), lambda: used(out, 0.0)),
            "lse": lazy_arg(lse.dtype, heads, lambda: used(lse, -float("inf")), "The natural log-sum-exp."),
        },
        reference=SPLIT_MERGE.format(h=h, s=s, vo=vo, dtype=str(out.dtype)[6:], lse=str(lse.dtype)[6:]),
        description="Attention within parts of each sequence's keys, merged by their log-sum-exps.",
        constraints=CONSTRAINTS,
    )


@cost_function("attention_split")
def split_cost(inputs: CostInputs) -> Cost:
    """Each sequence's rows are read once, of which values may be a part, and a part of its keys is written."""
    lengths, q, k, v = inputs.index("seq_lens"), inputs["q"], inputs["k_cache"], inputs["v_cache"]
    tokens = int(lengths.sum())
    read = tokens * k.shape[2] * k.shape[3] * k.element_size() + inputs.read("q", "seq_lens")
    written = int((lengths > 0).sum()) * q.shape[1] * inputs["partial"].shape[3] * inputs["partial"].element_size()
    return Cost(read + written, read, 2 * q.shape[1] * (q.shape[2] + v.shape[3]) * tokens, inputs.dtype)


cost_function("attention_split_merge")(CostInputs.unread)


@replay_rule("triton::_fwd_grouped_kernel_stage1", "triton::_fwd_kernel_stage1")
class SplitRule(ReplayRule):
    """SGLang's kernels have the same names, and lists of slots instead of a table."""

    idempotent_writes = ("Att_Out",)

    def prepare(self, bound: BoundCall) -> None:
        if bound.index("Req_to_tokens") is None:
            return use_dense_slots(bound, "kv_indptr", "kv_indices", ("K_Buffer", "V_Buffer"))
        pages = bound.spec("K_Buffer").shape
        if len(pages) != 4:
            raise Skip("its buffers do not say how many rows a page has")
        use_dense_pages(bound, "Req_to_tokens", "B_Seqlen", pages[1], ("K_Buffer", "V_Buffer"))


MERGE = """import torch


@torch.no_grad()
def run(prefix_output, prefix_lse, suffix_output, suffix_lse, num_merged):
    assert prefix_output.shape[1:] == suffix_output.shape[1:] == ({h}, {d})
    # An empty part has a log-sum-exp of minus infinity; FlashAttention 2 gives plus infinity for it.
    prefix, suffix = (lse.masked_fill(lse == float("inf"), -float("inf")) for lse in (prefix_lse, suffix_lse))
    prefix[:, int(num_merged) :] = -float("inf")
    lse = torch.logaddexp(prefix, suffix)
    prefix_share, suffix_share = ((part - lse).exp().nan_to_num(0.0).T[:, :, None] for part in (prefix, suffix))
    prefix_part = torch.where(prefix_share > 0, prefix_output.to(torch.float32) * prefix_share, 0.0)
    suffix_part = torch.where(suffix_share > 0, suffix_output.to(torch.float32) * suffix_share, 0.0)
    return (prefix_part + suffix_part).to(prefix_output.dtype){lse}
"""

OUTPUT = ("num_tokens", "num_qo_heads", "head_dim")
LSE = ("num_qo_heads", "num_tokens")
MERGED = "The first tokens, which have a prefix; the others are those of the suffix."


@family("attention_merge", "_C::merge_attn_states", "triton::merge_attn_states_kernel")
def merge(call: Invocation) -> KernelInstance:
    """Outputs: [tokens, heads, dim], natural log-sum-exps: [heads, tokens]. The merged one is optional."""
    call.refuse("output_scale", "USE_FP8")
    output, lse = call.tensor("output"), call.optional("output_lse")
    if output.dim() != 3 or output.dtype not in FLOATS:
        raise Unrecognized("its output is quantized")
    tokens, h, d = output.shape
    merged = call["prefill_tokens_with_context"]
    if merged is not None and not isinstance(merged, int):
        raise Unrecognized("how many tokens have a prefix is not known")
    inputs = {}
    for part in ("prefix", "suffix"):
        inputs[f"{part}_output"] = tensor_arg(call.tensor(f"{part}_output"), *OUTPUT)
        inputs[f"{part}_lse"] = tensor_arg(call.tensor(f"{part}_lse"), *LSE, description="Its natural log-sum-exp.")
    inputs["num_merged"] = scalar_arg(tokens if merged is None else min(merged, tokens), "int32", MERGED)
    outputs = {"output": lazy_arg(output.dtype, OUTPUT, lambda: call.tensor("output"))}
    if lse is not None:
        outputs["output_lse"] = lazy_arg(lse.dtype, LSE, lambda: lse)
    words = ("" if lse is not None else "_nolse") + abbreviate(output.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"attention_merge{words}_h{h}_d{d}",
        op_type="attention_merge",
        axes={"num_tokens": None, "num_qo_heads": h, "head_dim": d},
        inputs=inputs,
        outputs=outputs,
        reference=MERGE.format(h=h, d=d, lse=", lse" if lse is not None else ""),
        description="Attention over two sets of keys, merged by their log-sum-exps.",
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


cost_function("attention_merge", "mla_concat")(CostInputs.whole)

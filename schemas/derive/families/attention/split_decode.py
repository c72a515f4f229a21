"""Decodes in two launches, each a Definition of its own: what lies between them is in no other.

attention_split and attention_split_merge are vLLM's and SGLang's Triton decodes over a cache (Flash-Decoding): the keys
of each sequence are split in equal parts; the first launch attends within each, the second merges them by their
log-sum-exps. Latent attention (DeepSeek's) has one head of keys, whose first part are the values. Where each head of
queries has keys of its own, `_fwd_kernel_stage1` rounds the products of queries and keys, and no weights; releases of
SGLang's before 0.5.23, and vLLM, round their sums, too, in an order that the compiler chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import ReplayRule, cost_function, family, replay_rule, valid_input
from kcap.schemas.derive.families.attention.core import (
    CAP,
    SCALE_DESCRIPTION,
    SINKS_DESCRIPTION,
    MakeTensor,
    refuse_quantized,
    refuse_unmodelled_slots,
)
from kcap.schemas.derive.families.attention.cost import cached_bytes, pages_of
from kcap.schemas.derive.families.attention.pages import Pages, listed_slots, table_pages
from kcap.schemas.derive.families.attention.replay_rules import use_dense_pages, use_dense_slots
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, require_values, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, lazy_arg, scalar_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.descriptions import BEFORE

SPLIT = """import torch


@torch.no_grad()
def run({inputs}):
    assert k_cache.shape[1:] == ({ps}, {kv}, {d}) and v_cache.shape[1:] == ({ps}, {kv}, {vo})
    {copies}
    for b in range(q.shape[0]):
        {keys}
        k, v = (cache[pages].flatten(0, 1)[:length].to(torch.float32) for cache in (k_cache, v_cache))
        k, v = k.repeat_interleave({h} // {kv}, dim=1), v.repeat_interleave({h} // {kv}, dim=1)
        logits = {logits} * sm_scale
{cap}        for split, start in enumerate(range(0, length, max(size, 1))):
            end = min(start + size, length)
            {part} = attend(logits[:, start:end], v[start:end], {rounds_to})
    return {returned}


def attend(logits, v, dtype):
    # In the kernel's order, {block} keys at once, whose weights are rounded to the type of the cache: the results are
    # float32, and would show where they are not.
    top, total, output = logits.new_full(logits.shape[:1], -float("inf")), 0.0, 0.0
    for keys in range(0, logits.shape[1], {block}):
        part = logits[:, keys : keys + {block}]
        new_top = torch.maximum(top, part.amax(-1))
        weights, fade = torch.exp(part - new_top[:, None]), torch.exp(top - new_top)
        rounded = weights.to(dtype).to(torch.float32)
        output = output * fade[:, None] + torch.einsum("hk,khd->hd", rounded, v[keys : keys + {block}])
        top, total = new_top, total * fade + weights.sum(-1)
    return output / total[:, None], top + torch.log(total)
"""

SPLIT_MERGE = """import torch


@torch.no_grad()
def run({inputs}):
    assert partial.shape[1:] == ({h}, {s}, {size})
    {sizes}
    split = torch.arange({s}, device=partial.device)
    used = (split[None, :] * size[:, None] < lengths[:, None])[:, None, :]
    lses = {lses}.masked_fill(~used, -float("inf"))
    lse = torch.logsumexp(lses, dim=-1)
{sinks}    share = torch.where(used, (lses - lse[..., None]).exp(), 0.0)[..., None]
    output = torch.where(share > 0, partial[..., :{vo}] * share, 0.0).sum(2){scale}
    return output.to({dtype}){lse}
"""
SPLIT_SINKS = "    lse = torch.logaddexp(lse, sinks.to(torch.float32))\n"

PARTIAL = ("batch_size", "num_qo_heads", "num_splits", "partial_size")
PARTIAL_DESCRIPTION = "Of each part of the keys the output, then its natural log-sum-exp; an empty part has none."
OUTPUTS, LSES = (*PARTIAL[:3], "vo_dim"), PARTIAL[:3]
OUTPUTS_DESCRIPTION = "Of each part of the keys the output; an empty part has none."
LSES_DESCRIPTION = "Of each part of the keys the natural log-sum-exp; an empty part has none."
CACHE = ("num_pages", "page_size", "num_kv_heads")
CONSTRAINTS = ("partial_size == vo_dim + 1",)


@dataclass(frozen=True)
class KeysOfSplit:
    """How a kernel is told where each sequence's keys are, and where it writes what it makes of their parts.

    `k`, `v`: [pages, rows of a page, kv heads, dim]. `inputs`, `outputs` and `axes` are the Definition's; `text`: the
    lines of SPLIT for them.
    """

    k: torch.Tensor
    v: torch.Tensor
    inputs: dict[str, TensorArg]
    outputs: dict[str, TensorArg]
    axes: dict[str, int | None]
    constraints: tuple[str, ...]
    scale: str
    pages: Pages
    text: dict[str, str]


def pages_of_table(call: Invocation) -> KeysOfSplit:
    """vLLM's: a table of pages; `Att_Out`: [sequences, heads, splits, dim of values + 1]."""
    partial, lengths, k = call.tensor("Att_Out"), call.tensor("B_Seqlen"), call.tensor("K_Buffer")
    table = call.tensor("Req_to_tokens")
    if k.dim() != 4 or call["PAGE_SIZE"] != k.shape[1]:
        raise Unrecognized("its buffers are not paged, or its constants are not known")
    return KeysOfSplit(
        k,
        call.tensor("V_Buffer"),
        inputs={
            "block_table": tensor_arg(table, "max_num_reqs", "max_num_pages"),
            "seq_lens": tensor_arg(lengths, "batch_size"),
            "partial": tensor_arg(partial, *PARTIAL, description=BEFORE),
        },
        outputs={"partial_out": lazy_arg(partial.dtype, PARTIAL, lambda: partial, PARTIAL_DESCRIPTION)},
        axes={"partial_size": partial.shape[-1], "max_num_reqs": None, "max_num_pages": None},
        constraints=CONSTRAINTS,
        scale="sm_scale",
        pages=table_pages(table, lengths, k.shape[1]),
        text={
            "copies": "partial_out = partial.clone(memory_format=torch.contiguous_format)",
            "keys": """length, size = int(seq_lens[b]), -(-int(seq_lens[b]) // {s})
        pages = block_table[b, : -(-length // {ps})].long()""",
            "part": "partial_out[b, :, split, :{vo}], partial_out[b, :, split, {vo}]",
            "returned": "partial_out",
        },
    )


def slots_of_list(call: Invocation) -> KeysOfSplit:
    """SGLang's: a list of slots, of which a page has one; parts of whole units of keys, and their log-sum-exps apart.

    Buffers: [slots, kv heads, dim]. What a graph passes may be longer than its batch.
    """
    refuse_unmodelled_slots(call, "USE_FORCED")
    sequences = len(call.tensor("Q"))
    k, partial, lse = call.tensor("K_Buffer"), call.tensor("Att_Out")[:sequences], call.tensor("Att_Lse")[:sequences]
    v = k[..., : partial.shape[-1]] if call["HAS_MLA"] else call.tensor("V_Buffer")
    batch, indices = BatchOfSplits.of(call, sequences), call.tensor("kv_indices")
    pages = listed_slots(batch.starts, indices)
    return KeysOfSplit(
        k[:, None],
        v[:, None],
        inputs={
            **batch.inputs(),
            "kv_indices": lazy_arg(indices.dtype, ("num_kv_indices",), pages.indices, "The slot of each key."),
            "partial": tensor_arg(partial, *OUTPUTS, description=BEFORE),
            "partial_lse": tensor_arg(lse, *LSES, description=BEFORE),
        },
        outputs={
            "partial_out": lazy_arg(partial.dtype, OUTPUTS, lambda: partial, OUTPUTS_DESCRIPTION),
            "partial_lse_out": lazy_arg(lse.dtype, LSES, lambda: lse, LSES_DESCRIPTION),
        },
        axes={"len_indptr": None, "num_kv_indices": None},
        constraints=(*batch.constraints, "num_kv_indices == kv_indptr[-1].item()"),
        scale="sm_scale_withk",
        pages=pages,
        text={
            "copies": """partial_out = partial.clone(memory_format=torch.contiguous_format)
    partial_lse_out = partial_lse.clone(memory_format=torch.contiguous_format)""",
            "keys": f"""pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        length = pages.shape[0]
        size = -(-length // (max(int(num_kv_splits[b]), 1) * {batch.unit})) * {batch.unit}""",
            "part": "partial_out[b, :, split], partial_lse_out[b, :, split]",
            "returned": "partial_out, partial_lse_out",
        },
    )


@dataclass(frozen=True)
class BatchOfSplits:
    """Where SGLang's sequences begin, [sequences + 1], in how many parts each is, and of how many keys parts are
    multiples."""

    starts: torch.Tensor
    splits: torch.Tensor
    unit: int
    constraints = ("len_indptr == batch_size + 1",)

    @classmethod
    def of(cls, call: Invocation, sequences: int) -> BatchOfSplits:
        starts, splits = call.tensor("kv_indptr")[: sequences + 1], call.tensor("num_kv_splits")[:sequences]
        return cls(starts, splits, int(call.number("MIN_BLOCK_KV")))

    def inputs(self) -> dict[str, TensorArg]:
        parts = "In how many parts the keys of each sequence are, at most num_splits."
        return {
            "kv_indptr": tensor_arg(self.starts, "len_indptr", description="Where each sequence's keys begin."),
            "num_kv_splits": tensor_arg(self.splits, "batch_size", description=parts),
        }

    def lengths(self) -> torch.Tensor:
        return require_values(self.starts, "sequence starts").diff()


GROUPED = {"logits": 'torch.einsum("hd,khd->hk", q[b].to(torch.float32), k)', "rounds_to": "v_cache.dtype"}
UNGROUPED = {"logits": "(q[b] * k.to(q.dtype)).to(torch.float32).sum(-1).T", "rounds_to": "torch.float32"}


@family("attention_split", "triton::_fwd_grouped_kernel_stage1", "triton::_fwd_kernel_stage1")
def split(call: Invocation) -> KernelInstance:
    """`Q`: [sequences, heads, dim]."""
    keys = slots_of_list(call) if "kv_indices" in call.arguments else pages_of_table(call)
    q, k, v, cap, block = call.tensor("Q"), keys.k, keys.v, float(call.number("logit_cap")), int(call.number("BLOCK_N"))
    refuse_quantized(q, k, v)
    if block < 1 or k.dim() != 4 or v.dim() != 4 or call.tensor("Att_Out").dim() != 4:
        raise Unrecognized("its buffers have other dimensions, or its constants are not known")
    (_, h, d), (ps, kv), vo, s = q.shape, k.shape[1:3], v.shape[3], call.tensor("Att_Out").shape[2]
    inputs = {
        "q": tensor_arg(q, "batch_size", "num_qo_heads", "qk_dim"),
        "k_cache": tensor_arg(k, *CACHE, "qk_dim"),
        "v_cache": tensor_arg(v, *CACHE, "vo_dim"),
        **keys.inputs,
        "sm_scale": scalar_arg(call.number(keys.scale), description=SCALE_DESCRIPTION),
    }
    words = "_listed" * ("kv_indices" in inputs) + f"_softcap{cap:g}" * (cap > 0)
    sizes = {"num_qo_heads": h, "num_kv_heads": kv, "qk_dim": d, "vo_dim": vo, "page_size": ps, "num_splits": s}
    return KernelInstance(
        name=f"attention_split{words}{abbreviate(q.dtype, torch.bfloat16)}_h{h}_kv{kv}_qk{d}_vo{vo}_ps{ps}_s{s}",
        op_type="attention_split",
        axes={**sizes, "batch_size": None, "num_pages": None, **keys.axes},
        inputs=inputs,
        outputs=keys.outputs,
        reference=SPLIT.format(
            **{name: line.format(ps=ps, s=s, vo=vo) for name, line in keys.text.items()},
            **(GROUPED if "grouped" in call.base else UNGROUPED),
            inputs=", ".join(inputs),
            h=h,
            kv=kv,
            d=d,
            vo=vo,
            ps=ps,
            block=block,
            cap=CAP.format(softcap=cap) if cap > 0 else "",
        ),
        description="A decode over a paged cache within parts of each sequence's keys.",
        constraints=keys.constraints,
        flops=lambda: 2 * h * (d + vo) * int(keys.pages.lengths().sum()),
        touched=lambda: cached_bytes(keys.pages, k, v) + total_bytes(q) + 4 * h * (vo + 1) * len(q),
    )


@family("attention_split_merge", "triton::_fwd_kernel_stage2")
def merge_splits(call: Invocation) -> KernelInstance:
    """`Mid_O`: what `attention_split` wrote; the output: [sequences, heads, dim]."""
    call.refuse("OUTPUT_FP16")
    parts = listed_parts(call) if "kv_indptr" in call.arguments else parts_of_table(call)
    out, partial = parts.out, parts.inputs["partial"].value
    if partial.dim() != 4 or out.dim() != 3 or out.dtype not in FLOATS:
        raise Unrecognized("its parts are not of its output's size")
    (_, h, s, size), vo = partial.shape, out.shape[2]

    def used(rows: torch.Tensor, padding: float) -> torch.Tensor:
        has_tokens = (parts.lengths() > 0).to(rows.device).reshape(-1, *[1] * (rows.dim() - 1))
        return torch.where(has_tokens, rows, padding)

    heads, lse = ("batch_size", "num_qo_heads"), parts.lse
    outputs = {"output": lazy_arg(out.dtype, (*heads, "vo_dim"), lambda: used(out, 0.0))}
    if lse is not None:
        outputs["lse"] = lazy_arg(lse.dtype, heads, lambda: used(lse, -float("inf")), "The natural log-sum-exp.")
    words = "_listed" * (lse is None) + "_sinks" * ("sinks" in parts.inputs) + abbreviate(out.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"attention_split_merge{words}_h{h}_vo{vo}_s{s}",
        op_type="attention_split_merge",
        axes={"batch_size": None, "num_qo_heads": h, "num_splits": s, "vo_dim": vo, **parts.axes},
        inputs=parts.inputs,
        outputs=outputs,
        reference=SPLIT_MERGE.format(
            **parts.text,
            inputs=", ".join(parts.inputs),
            h=h,
            s=s,
            size=size,
            vo=vo,
            sinks=SPLIT_SINKS * ("sinks" in parts.inputs),
            dtype=out.dtype,
            lse=f", lse.to({lse.dtype})" if lse is not None else "",
        ),
        description="Attention within parts of each sequence's keys, merged by their log-sum-exps.",
        constraints=parts.constraints,
        touched=lambda: total_bytes(out, *([] if lse is None else [lse])),  # and the parts that there are
    )


@dataclass(frozen=True)
class PartsToMerge:
    """What a merge is given, as `KeysOfSplit`. `out`: [sequences, heads, dim], `lse`: [sequences, heads], natural."""

    out: torch.Tensor
    lse: torch.Tensor | None
    inputs: dict[str, TensorArg]
    axes: dict[str, int | None]
    constraints: tuple[str, ...]
    lengths: MakeTensor
    text: dict[str, str]


def parts_of_table(call: Invocation) -> PartsToMerge:
    """vLLM's."""
    partial, lengths, out = call.tensor("Mid_O"), call.tensor("B_Seqlen"), call.tensor("o")
    if partial.shape[-1] != out.shape[-1] + 1:
        raise Unrecognized("its parts are not of its output's size")
    return PartsToMerge(
        out,
        call.tensor("lse"),
        inputs={
            "partial": tensor_arg(partial, *PARTIAL, description=PARTIAL_DESCRIPTION),
            "seq_lens": tensor_arg(lengths, "batch_size"),
        },
        axes={"partial_size": partial.shape[-1]},
        constraints=CONSTRAINTS,
        lengths=lambda: lengths,
        text={
            "sizes": f"lengths, size = seq_lens, -(-seq_lens // {partial.shape[2]})",
            "lses": f"partial[..., {out.shape[2]}]",
            "scale": "",
        },
    )


def listed_parts(call: Invocation) -> PartsToMerge:
    """SGLang's: values may have a scale, and each head a sink."""
    call.refuse("FORCED_KV_SPLITS")
    out = call.tensor("O")
    partial, lse = call.tensor("Mid_O")[: len(out)], call.tensor("Mid_O_1")[: len(out)]
    batch = BatchOfSplits.of(call, len(out))
    inputs = {
        "partial": tensor_arg(partial, *OUTPUTS, description=OUTPUTS_DESCRIPTION),
        "partial_lse": tensor_arg(lse, *LSES, description=LSES_DESCRIPTION),
        **batch.inputs(),
        "v_scale": scalar_arg(call.number("v_scale"), description="The scale of the cache's values."),
    }
    if (sinks := call.optional("sink_ptr")) is not None:
        inputs["sinks"] = tensor_arg(sinks, "num_qo_heads", description=SINKS_DESCRIPTION)
    return PartsToMerge(
        out,
        None,
        inputs,
        axes={"len_indptr": None},
        constraints=batch.constraints,
        lengths=batch.lengths,
        text={
            "sizes": f"""lengths = kv_indptr.diff()
    size = -(-lengths // (num_kv_splits.clamp(min=1) * {batch.unit})) * {batch.unit}""",
            "lses": "partial_lse",
            "scale": " * v_scale",
        },
    )


@cost_function("attention_split")
def split_cost(inputs: CostInputs) -> Cost:
    """Each row is read once, and of each sequence a part of its keys is written."""
    q, k, v, partial = inputs["q"], inputs["k_cache"], inputs["v_cache"], inputs["partial"]
    pages = pages_of(inputs, k.shape[1])
    lengths, read = pages.lengths(), cached_bytes(pages, k, v) + inputs.read("q")
    written = int((lengths > 0).sum()) * q.shape[1] * (v.shape[3] + 1) * partial.element_size()
    return Cost(read + written, read, 2 * q.shape[1] * (q.shape[2] + v.shape[3]) * int(lengths.sum()), inputs.dtype)


cost_function("attention_split_merge")(CostInputs.unread)


@valid_input("num_kv_splits", op_types=("attention_split", "attention_split_merge"))
def valid_splits(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """1 to as many as there is room for."""
    most = draft.size("num_splits")
    return draft.integers(1, most + 1, draft.shape(name)) if most else None


@replay_rule("triton::_fwd_grouped_kernel_stage1", "triton::_fwd_kernel_stage1")
class SplitRule(ReplayRule):
    """SGLang's kernels have the same names, and lists of slots instead of a table."""

    idempotent_writes = ("Att_Out", "Att_Lse")

    def prepare(self, bound: BoundCall) -> None:
        if bound.index("Req_to_tokens") is None:
            return use_dense_slots(bound, bound.spec("Q").shape[0])
        pages = bound.spec("K_Buffer").shape
        if len(pages) != 4:
            raise Skip("its buffers do not say how many rows a page has")
        use_dense_pages(bound, "Req_to_tokens", "B_Seqlen", pages[1], ("K_Buffer", "V_Buffer"))

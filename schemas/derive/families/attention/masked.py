"""attention_masked: aten's attention under a mask that is an argument, as padded batches have one.

A dimension that the mask broadcasts is one of its own, of size 1. `gqa_ragged.scaled_dot_product_attention` recognizes
the operator.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.families import cost_function, valid_input
from kcap.schemas.derive.families.attention.core import SCALE_DESCRIPTION, refuse_quantized
from kcap.schemas.derive.families.attention.valid_inputs import kept_keys
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized, total_bytes
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg
from kcap.schemas.derive.workload_draft import WorkloadDraft

MASKED = """import torch


@torch.no_grad()
def run(q, k, v, attn_mask, sm_scale):
    assert q.shape[1] == {h} and q.shape[3] == {d}
    assert k.shape[1] == {kv} and v.shape[1] == {kv} and v.shape[3] == {vo}
    k, v = (part.to(torch.float32).repeat_interleave({group}, dim=1) for part in (k, v))
    logits = torch.matmul(q.to(torch.float32), k.transpose(2, 3)) * sm_scale
    logits = {masked}
    sees_none = torch.isneginf(logits).all(dim=-1, keepdim=True)
    weights = torch.softmax(logits, dim=-1).masked_fill(sees_none, 0.0)
    return torch.matmul(weights, v).to(q.dtype)
"""


HIDDEN, ADDED = 'logits.masked_fill(~attn_mask, float("-inf"))', "logits + attn_mask.to(torch.float32)"


def masked_attention(
    call: Invocation, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> KernelInstance:
    """A bool mask has True for a key that is seen, another is added to the logits (PyTorch's
    `scaled_dot_product_attention`)."""
    mask = call.tensor("attn_mask")
    refuse_quantized(q, k, v)
    if call["is_causal"] or mask.dim() > 4 or not (mask.dtype == torch.bool or mask.dtype in FLOATS):
        raise Unrecognized("two masks, or one that is neither bool nor of floats")
    (n, h, tokens, d), (_, kv, keys, vo) = q.shape, v.shape
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    mask = mask.expand(*mask.shape[:3], keys)
    sequences, mask_heads, queries, _ = mask.shape
    words = "" if mask.dtype == torch.bool else f"_added{abbreviate(mask.dtype, q.dtype)}"
    words += "_each_head" if mask_heads > 1 else ""
    words += ("" if sequences == n else "_all_sequences") + ("" if queries == tokens else "_all_queries")
    sizes = {"num_qo_heads": h, "num_kv_heads": kv, "qk_dim": d, "vo_dim": vo}
    mask_axes = (
        "batch_size" if sequences == n else "num_mask_sequences",
        "num_mask_heads",
        "q_len" if queries == tokens else "mask_q_len",
        "kv_len",
    )
    mask_sizes = {name: size for name, size in zip(mask_axes, mask.shape, strict=True) if "mask" in name}

    def touched() -> int:
        return int(total_bytes(q, mask) + masked_work(mask, q, k, v)[1] + n * tokens * h * vo * q.element_size())

    return KernelInstance(
        name=f"attention_masked{words}{abbreviate(q.dtype, torch.bfloat16)}_h{h}_kv{kv}"
        + (f"_d{d}" if d == vo else f"_qk{d}_vo{vo}"),
        op_type="attention_masked",
        axes={**sizes, **mask_sizes, **dict.fromkeys(("batch_size", "q_len", "kv_len"))},
        inputs={
            "q": tensor_arg(q, "batch_size", "num_qo_heads", "q_len", "qk_dim"),
            "k": tensor_arg(k, "batch_size", "num_kv_heads", "kv_len", "qk_dim"),
            "v": tensor_arg(v, "batch_size", "num_kv_heads", "kv_len", "vo_dim"),
            "attn_mask": tensor_arg(
                mask,
                *mask_axes,
                description="True: the query sees the key." if mask.dtype == torch.bool else "Added to the logits.",
            ),
            "sm_scale": scalar_arg(scale, description=SCALE_DESCRIPTION),
        },
        outputs={"output": lazy_arg(q.dtype, ("batch_size", "num_qo_heads", "q_len", "vo_dim"), lambda: call.result)},
        reference=MASKED.format(
            h=h, kv=kv, d=d, vo=vo, group=h // kv, masked=HIDDEN if mask.dtype == torch.bool else ADDED
        ),
        description="Attention of a batch of sequences of one length, under a mask that is an input.",
        flops=lambda: masked_work(mask, q, k, v)[0],
        touched=touched,
    )


def masked_work(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Operations for the pairs of a query and a key that a mask leaves, and bytes of the keys and values that a query
    sees; of a mask without numbers (meta) none are known.

    `mask`: broadcast to [batch, heads, queries, keys]; `q`: [batch, heads, queries, dim], `k`, `v`: [batch, kv heads,
    keys, dim].
    """
    if mask.is_meta or not mask.numel():
        return 0, 0
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2  # programs add the least number
    pairs = int(seen.sum()) * (q[..., 0].numel() * k.shape[2] // mask.numel())
    rows = int(seen.any(dim=1).any(dim=1).sum()) * (len(k) // len(mask))
    row = sum(part[0, :, 0].numel() * part.element_size() for part in (k, v))
    return 2 * (q.shape[3] + v.shape[3]) * pairs, rows * row


@cost_function("attention_masked")
def masked_cost(inputs: CostInputs) -> Cost:
    flops, read = masked_work(*(inputs[name] for name in ("attn_mask", "q", "k", "v")))
    return inputs.cost(inputs.read("q", "attn_mask") + read, flops)


@valid_input("attn_mask", op_types=("attention_masked",))
def added_mask(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """It hides keys by -inf. One of bools is like any other operator's."""
    if draft.definition.inputs[name].dtype == "bool":
        return None
    kept = kept_keys(draft, name)
    return draft.reals(-1, 1, draft.shape(name)).masked_fill(~kept, -torch.inf)

"""attention_merge: two sets of keys merged by their log-sum-exps (FlashInfer, arXiv:2501.01005, section 2.2).

A prompt's own keys and what is cached before it, or a shared prefix and the rest.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, scalar_arg, tensor_arg

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


cost_function("attention_merge")(CostInputs.whole)

"""What the gated delta rule is made from, by Triton kernels of vLLM and SGLang: gates, normed queries and keys.

`gdn_split_projections`: SGLang's projections, taken apart. `gdn_split_qkv`: its queries, keys and values of a prefill.
`gdn_gating`: the logarithm of the decay, and the rate at which the state takes values on, from the projections a and b.
`gdn_post_conv`: these, and queries, keys and values out of the short convolution's output. `l2norm`: vectors of length
one, by Flash Linear Attention's kernels. Read in vLLM 0.22.1 and 0.32, SGLang 0.5.15 and 0.5.23.
"""

from __future__ import annotations

import torch

from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.families import cost_function, family
from kcap.schemas.derive.families.recurrent.gated_delta_rule import require_softplus
from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, TensorArg, abbreviate, dtype_name, tensor_arg

GATES = """    decay = -A_log.to(torch.float32).exp() * F.softplus(a.to(torch.float32) + dt_bias.to(torch.float32))
    rate = torch.sigmoid(b.to(torch.float32))"""

GATING = f"""import torch
import torch.nn.functional as F


@torch.no_grad()
def run(A_log, a, b, dt_bias):
    assert a.shape[1] == b.shape[1] == {{h}}
{GATES}{{twice}}{{rounded}}
    return decay.to(torch.{{decay}}), rate.to(torch.{{rate}})
"""

POST_CONV = f"""import torch
import torch.nn.functional as F


@torch.no_grad()
def run(mixed_qkv, A_log, a, b, dt_bias):
    q, k, v = mixed_qkv.to(torch.float32).split([{{h}} * {{k}}, {{h}} * {{k}}, {{hv}} * {{v}}], dim=1)
    q, k = (m.unflatten(1, ({{h}}, {{k}})) for m in (q, k)){{normed}}
{GATES}
    q, k, v = (m.to(mixed_qkv.dtype) for m in (q, k, v.unflatten(1, ({{hv}}, {{v}}))))
    return q, k, v, {{decay}}, rate
"""
NORMED = "\n    q, k = (m * torch.rsqrt(m.pow(2).sum(-1, keepdim=True) + {eps!r}) for m in (q, k))"

NORM = """import torch


@torch.no_grad()
def run(x):
    assert x.shape[1] == {d}
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + {eps!r})).to(torch.{dtype})
"""

SPLIT_PROJECTIONS = """import torch


@torch.no_grad()
def run(mixed_qkvz, mixed_ba):
    assert mixed_qkvz.shape[1] == 2 * ({h} * {k} + {hv} * {v}) and mixed_ba.shape[1] == 2 * {hv}
{split}
    return mixed_qkv, z.reshape(-1, {hv}, {v}), b.reshape(-1, {hv}), a.reshape(-1, {hv})
"""
INTERLEAVED = """    share = {hv} // {h} * {v}
    q, k, v, z = mixed_qkvz.unflatten(1, ({h}, -1)).split([{k}, {k}, share, share], dim=2)
    b, a = mixed_ba.unflatten(1, ({h}, -1)).chunk(2, dim=2)
    mixed_qkv = torch.cat([m.flatten(1) for m in (q, k, v)], dim=1)"""
CONTIGUOUS = """    mixed_qkv, z = mixed_qkvz.split([2 * {h} * {k} + {hv} * {v}, {hv} * {v}], dim=1)
    mixed_qkv, z, b, a = (part.clone() for part in (mixed_qkv, z, *mixed_ba.chunk(2, dim=1)))"""

SPLIT_QKV = """import torch


@torch.no_grad()
def run(mixed_qkv):
    q, k, v = mixed_qkv.split([{h} * {k}, {h} * {k}, {hv} * {v}], dim=1)
    q, k = (m.unflatten(1, ({h}, {k})).clone() for m in (q, k))
    return q, k, v.unflatten(1, ({hv}, {v})).clone()
"""

HEADS = ("total_tokens", "num_v_heads")
KEYS, VALUES = ("total_tokens", "num_k_heads", "head_size"), (*HEADS, "v_head_size")
SIZES = ("NUM_HEADS_QK", "NUM_HEADS_V", "HEAD_QK", "HEAD_V")
DECAY, RATE = "The logarithm of the decay.", "The rate at which the state takes values on."


@family(
    "gdn_split_projections",
    "triton::fused_qkvzba_split_reshape_cat_kernel",
    "triton::fused_qkvzba_split_reshape_cat_contiguous_kernel",
)
def split_projections(call: Invocation) -> KernelInstance:
    """`mixed_qkvz`, `mixed_ba`: [tokens, …], what belongs to a head of keys together, or (`contiguous`) all queries,
    then all keys, and so on. `mixed_qkv`: queries, keys, values of all heads; `z`: the output's gate.
    """
    qkvz, ba = call.tensor("mixed_qkvz"), call.tensor("mixed_ba")
    qkv, z, b, a = (call.tensor(name) for name in ("mixed_qkv", "z", "b", "a"))
    h, hv, k, v = (int(call.number(name)) for name in SIZES)
    if (qkvz.dtype, ba.dtype) != (qkv.dtype, b.dtype) or qkvz.shape[1] != 2 * (h * k + hv * v):
        raise Unrecognized("it converts what it splits, or the projections are laid out otherwise")
    layout, word = (CONTIGUOUS, "_contiguous") if call.base.endswith("contiguous_kernel") else (INTERLEAVED, "")
    sizes = {"h": h, "hv": hv, "k": k, "v": v}
    words = abbreviate(qkvz.dtype, torch.bfloat16) + abbreviate(ba.dtype, qkvz.dtype).replace("_", "_ba")
    return KernelInstance(
        name=f"gdn_split_projections{word}{words}_qk{h}_v{hv}_k{k}_d{v}",
        op_type="gdn_split_projections",
        axes={
            "total_tokens": None,
            "qkvz_size": qkvz.shape[1],
            "ba_size": ba.shape[1],
            "qkv_size": qkv.shape[1],
            "num_v_heads": hv,
            "v_head_size": v,
        },
        inputs={
            "mixed_qkvz": tensor_arg(qkvz, "total_tokens", "qkvz_size"),
            "mixed_ba": tensor_arg(ba, "total_tokens", "ba_size"),
        },
        outputs={
            "mixed_qkv": tensor_arg(qkv, "total_tokens", "qkv_size"),
            "z": tensor_arg(z, *VALUES, description="The gate of the output."),
            "b": tensor_arg(b, *HEADS),
            "a": tensor_arg(a, *HEADS),
        },
        reference=SPLIT_PROJECTIONS.format(split=layout.format(**sizes), **sizes),
        description="The projections of the gated delta rule, taken apart.",
    )


@family("gdn_split_qkv", "triton::fused_qkv_split_gdn_prefill_kernel")
def split_qkv(call: Invocation) -> KernelInstance:
    """`mixed_qkv`: [tokens, queries, keys and values of all heads]; `q`, `k`, `v`: [1, tokens, heads, size]."""
    mixed, (q, k, v) = call.tensor("mixed_qkv"), (call.tensor(name).flatten(0, 1) for name in "qkv")
    (h, d), (hv, dv) = q.shape[1:], v.shape[1:]
    if q.shape != k.shape or {q.dtype, k.dtype, v.dtype} != {mixed.dtype}:
        raise Unrecognized("its queries and keys differ, or it converts what it splits")
    return KernelInstance(
        name=f"gdn_split_qkv{abbreviate(mixed.dtype, torch.bfloat16)}_qk{h}_v{hv}_k{d}_d{dv}",
        op_type="gdn_split_qkv",
        axes=axes_of_parts(mixed, q, v),
        inputs={"mixed_qkv": tensor_arg(mixed, "total_tokens", "qkv_size")},
        outputs=parts_args(q, k, v),
        reference=SPLIT_QKV.format(h=h, k=d, hv=hv, v=dv),
        description="Queries, keys and values of the gated delta rule, out of its short convolution's output.",
    )


def axes_of_parts(mixed: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> dict[str, int | None]:
    """Of `mixed`, [tokens, queries, keys and values of all heads], and its parts, [tokens, heads, size]."""
    (h, d), (hv, dv) = q.shape[1:], v.shape[1:]
    sizes = {"num_k_heads": h, "num_v_heads": hv, "head_size": d, "v_head_size": dv}
    return {"total_tokens": None, "qkv_size": mixed.shape[1], **sizes}


def parts_args(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, TensorArg]:
    return {"q": tensor_arg(q, *KEYS), "k": tensor_arg(k, *KEYS), "v": tensor_arg(v, *VALUES)}


def projections(call: Invocation, suffix: str = "") -> dict[str, TensorArg]:
    """`A_log`, `dt_bias`: [heads], `a`, `b`: [tokens, heads]."""
    tensors = {name: call.tensor(name + suffix) for name in ("A_log", "a", "b", "dt_bias")}
    return {name: tensor_arg(tensor, *HEADS[2 - tensor.dim() :]) for name, tensor in tensors.items()}


@family("gdn_gating", "triton::fused_gdn_gating_kernel", "triton::fused_olmo_hybrid_gdn_gating_kernel")
def gating(call: Invocation) -> KernelInstance:
    """`g`, `beta_output`: [1, tokens, heads]. Of Olmo a rate may be twice as large.

    SGLang's kernel, of those read the one with strides, writes rates of float32 that are rounded to the dtype of `b`.
    """
    require_softplus(call["threshold"], call["beta"])
    inputs, decay, rate = projections(call), call.tensor("g").flatten(0, -2), call.tensor("beta_output").flatten(0, -2)
    h, twice, source = decay.shape[1], call["allow_neg_eigval"] is True, call.tensor("b").dtype
    rounded = call["stride_b"] is not None and source not in (rate.dtype, torch.float32)
    words = (
        ("_twice" if twice else "")
        + ("_rounded" if rounded else "")
        + abbreviate(call.tensor("a").dtype, torch.bfloat16)
    )
    words += abbreviate(rate.dtype, call.tensor("a").dtype).replace("_", "_rate")
    return KernelInstance(
        name=f"gdn_gating{words}_v{h}",
        op_type="gdn_gating",
        axes={"total_tokens": None, "num_v_heads": h},
        inputs=inputs,
        outputs={
            "g": tensor_arg(decay, *HEADS, description=DECAY),
            "beta": tensor_arg(rate, *HEADS, description=RATE),
        },
        reference=GATING.format(
            h=h,
            twice=" * 2.0" if twice else "",
            rounded="\n    rate = rate.to(b.dtype)" if rounded else "",
            decay=dtype_name(decay.dtype),
            rate=dtype_name(rate.dtype),
        ),
        description="The gates of the gated delta rule, from their projections.",
        flops=10 * decay.numel(),
    )


@family("gdn_post_conv", "triton::_fused_post_conv_kernel")
def post_conv(call: Invocation) -> KernelInstance:
    """`mixed_qkv_ptr`: [tokens, queries, keys and values of all heads]; its parts and gates: [tokens, heads, …]."""
    require_softplus(call["SOFTPLUS_THRESHOLD"], 1.0)
    mixed, (q, k, v) = call.tensor("mixed_qkv_ptr"), (call.tensor(f"{name}_ptr") for name in "qkv")
    decay, rate, normed, exp = call.tensor("g_ptr"), call.tensor("beta_ptr"), call["APPLY_L2NORM"], call["OUTPUT_G_EXP"]
    if not isinstance(normed, bool) or not isinstance(exp, bool) or {decay.dtype, rate.dtype} != {torch.float32}:
        raise Unrecognized("its constants are not known, or its gates are no float32")
    if {tensor.dtype for tensor in (q, k, v)} != {mixed.dtype}:
        raise Unrecognized("it converts what it splits")
    (h, d), (hv, dv) = q.shape[1:], v.shape[1:]
    words = ("_l2norm" if normed else "") + ("_exp" if exp else "") + abbreviate(mixed.dtype, torch.bfloat16)
    return KernelInstance(
        name=f"gdn_post_conv{words}_qk{h}_v{hv}_k{d}_d{dv}",
        op_type="gdn_post_conv",
        axes=axes_of_parts(mixed, q, v),
        inputs={"mixed_qkv": tensor_arg(mixed, "total_tokens", "qkv_size"), **projections(call, "_ptr")},
        outputs={
            **parts_args(q, k, v),
            "g": tensor_arg(decay, *HEADS, description="The decay." if exp else DECAY),
            "beta": tensor_arg(rate, *HEADS, description=RATE),
        },
        reference=POST_CONV.format(
            h=h,
            k=d,
            hv=hv,
            v=dv,
            normed=NORMED.format(eps=float(call.number("L2NORM_EPS"))) if normed else "",
            decay="decay.exp()" if exp else "decay",
        ),
        description="Queries, keys, values and gates of the gated delta rule, after its short convolution.",
        flops=(4 * (q.numel() + k.numel()) if normed else 0) + 10 * decay.numel(),
    )


@family("l2norm", "triton::l2norm_fwd_kernel", "triton::l2norm_fwd_kernel1", "triton::l2norm_fwd_kernel2")
def l2norm(call: Invocation) -> KernelInstance:
    """`x` and `y`, or `X` and `Y`: [rows, columns]."""
    x, y, eps = call.tensor("x", "X"), call.tensor("y", "Y"), float(call.number("eps"))
    d, words = x.shape[1], abbreviate(x.dtype, torch.bfloat16) + abbreviate(y.dtype, x.dtype).replace("_", "_out")
    return KernelInstance(
        name=f"l2norm{words}{'' if eps == 1e-6 else f'_eps{eps:g}'}_d{d}",
        op_type="l2norm",
        axes={"batch_size": None, "hidden_size": d},
        inputs={"x": tensor_arg(x, "batch_size", "hidden_size")},
        outputs={"output": tensor_arg(y, "batch_size", "hidden_size")},
        reference=NORM.format(d=d, eps=eps, dtype=dtype_name(y.dtype)),
        description="Each row divided by its length.",
        flops=4 * x.numel(),
    )


cost_function("gdn_split_projections", "gdn_split_qkv", "gdn_gating", "gdn_post_conv", "l2norm")(CostInputs.whole)

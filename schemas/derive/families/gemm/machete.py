"""weight_only_gemm by Machete, vLLM's kernel for AWQ and GPTQ on Hopper: C = A @ (q * scale + zero).

Its weight lies as CUTLASS's layouts for the device want it (`machete_prepack_B`). The Definition has it before that, as
GPTQ packs it: [K / 8, N] int32, a word has eight rows, the first in its lowest bits. Which element went where is found
by prepacking the elements' numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.families import ReplayRule, family, replay_rule
from kcap.schemas.derive.families.gemm.packed_weight import scalar_type_of
from kcap.schemas.derive.families.gemm.weight_only import set_words
from kcap.schemas.derive.invocation import FLOATS, Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, abbreviate, lazy_arg, packed_arg, tensor_arg

REFERENCE = """import torch


@torch.no_grad()
def run({inputs}):
    assert B.shape == ({k} // 8, {n})
    shifts = torch.arange(0, 32, 4, device=B.device)
    q = ((B.to(torch.int64)[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
    scale = B_scale.to(torch.float32).repeat_interleave({group}, dim=0)
    w = (q - {bias}) * scale{zero}
    return (A.to(torch.float32) @ w.to(A.dtype).to(torch.float32)).to(A.dtype)
"""
ZERO = " + B_zero.to(torch.float32).repeat_interleave({group}, dim=0)"
WORDS = "W: eight rows a word, as GPTQ's."
DIGIT = 4  # bits of a position that one element of four bits can hold

Prepack = Callable[[torch.Tensor], torch.Tensor]


@family("weight_only_gemm", "_C::machete_mm")
def machete_mm(call: Invocation) -> KernelInstance:
    """`A`: [M, K]; `B`: [K / 8, N], prepacked; scales and zeros (times -scale): [K / group, N]."""
    call.refuse("channel_scales", "token_scales", "out_type")
    a, b, scale, zero = call.tensor("A"), call.tensor("B"), call.tensor("group_scales"), call.optional("group_zeros")
    kind = int(call.number("b_type"))
    bits, bias = scalar_type_of(kind)
    (m, k), n = a.shape, b.shape[1]
    if bits != 4 or a.dtype not in FLOATS or scale.dtype != a.dtype or b.shape[0] * 8 != k or k % len(scale):
        raise Unrecognized("not a product with a weight of four bits in groups of rows")
    group = k // len(scale)

    def plain() -> torch.Tensor:
        dtypes = a.dtype, kind, scale.dtype
        return before_prepacking(b, lambda words: torch.ops._C.machete_prepack_B(words.t().contiguous().t(), *dtypes))

    inputs = {
        "A": tensor_arg(a, "M", "K"),
        "B": replace(packed_arg(b, "K_packed", "N", description=WORDS), value=b if b.is_meta else plain),
        "B_scale": tensor_arg(scale, "K_group", "N"),
    }
    if zero is not None:
        inputs["B_zero"] = tensor_arg(zero, "K_group", "N", description="What is added to each scaled row.")
    return KernelInstance(
        name=f"weight_only_gemm_gptq{'_zero' if zero is not None else ''}{abbreviate(a.dtype, torch.bfloat16)}"
        f"_n{n}_k{k}_g{group}",
        op_type="weight_only_gemm",
        axes={"M": None, "K": k, "N": n, "K_packed": k // 8, "K_group": len(scale)},
        inputs=inputs,
        outputs={"C": lazy_arg(a.dtype, ("M", "N"), lambda: call.result)},
        reference=REFERENCE.format(
            inputs=", ".join(inputs),
            k=k,
            n=n,
            group=group,
            bias=bias,
            zero=ZERO.format(group=group) if zero is not None else "",
        ),
        description=f"C = A @ W of a W of 4 bits with a scale for each {group} rows.",
        tags=("quantization:int4",),
        flops=2 * m * n * k,
    )


def before_prepacking(words: torch.Tensor, prepack: Prepack) -> torch.Tensor:
    """The matrix that `prepack`, which only moves elements of four bits, made `words` of: int32 [K / 8, N]."""
    count = words.numel() * 8
    positions = torch.arange(count, dtype=torch.int32, device=words.device)
    origins = torch.zeros_like(positions)
    for shift in range(0, count.bit_length(), DIGIT):
        digits = prepack(packed(positions >> shift & 15, words.shape))
        origins |= unpacked(digits) << shift
    plain = torch.empty_like(positions)
    plain[origins.long()] = unpacked(words)
    return packed(plain, words.shape)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.contiguous().flatten()[:, None] >> shifts & 15).flatten()


def packed(elements: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`elements` of [K / 8, N, 8] in words of `shape`."""
    words = torch.zeros(shape.numel(), dtype=torch.int32, device=elements.device)
    for place in range(8):
        words |= elements[place::8] << 4 * place
    return words.reshape(shape)


@replay_rule("_C::machete_mm")
class MacheteMm(ReplayRule):
    """Any bits are a prepacked weight."""

    def prepare(self, bound: BoundCall) -> None:
        set_words(bound, "B")

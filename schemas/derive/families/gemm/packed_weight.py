"""Weights of 4 or 8 bits as kernels want them packed, and the text that unpacks them in a reference.

W is [K, N] with a scale for each group of its rows; `B` holds it in int32, whose words are

- AWQ's: [K, N / 8], a word has columns 0 2 4 6 1 3 5 7 of eight;
- GPTQ's, shuffled for exllama: [K / 8, N], a word has rows 0 2 4 6 1 3 5 7 of eight;
- Marlin's: [K / 16, N * 16 / (values in a word)], tiles of 16 by 64 in the order in which the threads of a warp hold
  them (`get_weight_perm` of vLLM's marlin_utils_test.py), scales and zero points permuted to match (marlin_utils.py);
- vLLM's for CPUs: [N / 16, K * 2], rows of 16 columns one after another, eight columns in a word.

Zero points are packed along the columns. Without them the middle of the range is zero (GPTQ's `uint4b8`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.schemas.derive.invocation import FLOATS, Unrecognized
from kcap.schemas.derive.kernel import TensorArg, abbreviate, packed_arg, tensor_arg

UNPACKING = """import torch


def unpacked(words, bits):
    shifts = torch.arange(0, 32, bits, device=words.device)
    return (words.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)


def weight({weight_inputs}):
{weight}
{scale}
{zero}    return (q - zero) * scale.repeat_interleave({group}, dim=0)
"""

RUN = """

@torch.no_grad()
def run({inputs}):
    assert B.shape == ({rows}, {columns})
    w = weight({weight_inputs})
    {result}
"""

AWQ_WEIGHT = """    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=B.device)
    q = unpacked(B, 4)[..., order].flatten(-2)"""
AWQ_ZERO = """    zero = unpacked(B_zero, 4)[..., order].flatten(-2).repeat_interleave({group}, dim=0)
"""
GPTQ_WEIGHT = """    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=B.device)
    q = unpacked(B, 4)[..., order].transpose(1, 2).flatten(0, 1)"""
GPTQ_ZERO = """    zero = (unpacked(B_zero, 4).flatten(-2) + {offset}).repeat_interleave({group}, dim=0)
"""
MARLIN_WEIGHT = """    thread, tile = torch.arange(32)[:, None, None], torch.arange(4)[None, :, None]
    held = torch.tensor({held})  # of the eight values of a thread and a tile, in the order of a word
    row = thread % 4 * 2 + held % 2 + held % 4 // 2 * 8
    column = thread // 4 + held // 4 * 8
    place = (256 * tile + 16 * row + column).flatten().to(B.device)
    packed = unpacked(B, {bits}).reshape(-1, 1024)
    tiles = torch.zeros_like(packed)
    tiles[:, place] = packed
    q = tiles.reshape({k} // 16, {n} // 16, 16, 16).transpose(1, 2).reshape({k}, {n})"""
MARLIN_SCALE = "    scale = B_scale.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3)"
MARLIN_CHANNEL_SCALE = "    scale = B_scale.unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-4)"
MARLIN_ZERO = """    zero = unpacked(B_zero, {bits}).flatten(-2).unflatten(-1, (-1, {word}))[..., {order}]
    zero = zero.flatten(-2).unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3).repeat_interleave({group}, dim=0)
"""
MARLIN_ORDERS = {  # of the values in a word: as the weights lie in it, and where the zero point of each column is
    4: ([0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]),
    8: ([0, 2, 1, 3, 4, 6, 5, 7], [0, 2, 1, 3]),
}
CPU_WEIGHT = "    q = unpacked(B, 4).reshape({n} // 16, {k}, 16).transpose(0, 1).flatten(1)"
CPU_ZERO = """    zero = unpacked(B_zero, 4).flatten(-2).repeat_interleave({group}, dim=0)
"""
PLAIN_SCALE = "    scale = B_scale"


@dataclass(frozen=True)
class PackedWeight:
    """W, [k, n] of `bits`: the text that unpacks it, its scales and its zero points, for the reference."""

    layout: str
    k: int
    n: int
    bits: int
    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    texts: tuple[str, str, str]

    def __post_init__(self) -> None:
        groups = self.scale.shape[0]
        if self.packed.dtype != torch.int32 or self.packed.numel() * 32 != self.k * self.n * self.bits:
            raise Unrecognized("its weight is not packed in int32")
        if self.scale.shape != (groups, self.n) or self.k % groups or self.scale.dtype not in FLOATS:
            raise Unrecognized("its scales are not of groups of rows")
        if self.zero is not None and self.zero.numel() * 32 != groups * self.n * self.bits:
            raise Unrecognized("its zero points are not packed in int32")

    @property
    def group(self) -> int:
        """The rows that share a scale."""
        return int(self.k // self.scale.shape[0])

    def name(self, dtype: torch.dtype) -> str:
        """What of a Definition's name says how W is packed; `dtype`: of the floats beside it."""
        word = f"{self.layout}{'' if self.bits == 4 else '_int8'}{'_zp' if self.zero is not None else ''}"
        return f"{word}{abbreviate(dtype, torch.bfloat16)}_n{self.n}_k{self.k}_g{self.group}"

    def inputs(self) -> dict[str, TensorArg]:
        inputs = {
            "B": packed_arg(self.packed, "B_rows", "B_columns", description="W, packed."),
            "B_scale": tensor_arg(self.scale, "K_group", "N"),
        }
        if self.zero is not None:
            inputs["B_zero"] = packed_arg(self.zero, "K_group", "N_packed", description="Zero points, packed.")
        return inputs

    def axes(self) -> dict[str, int | None]:
        rows, columns = self.packed.shape
        zero = {} if self.zero is None else {"N_packed": self.zero.shape[1]}
        return {"B_rows": rows, "B_columns": columns, "K_group": self.scale.shape[0], "N": self.n, **zero}

    def unpacking(self) -> str:
        """A module's beginning: `weight` of the inputs is W in float32."""
        weight, scale, zero = self.texts
        return UNPACKING.format(
            weight_inputs=", ".join(self.inputs()),
            weight=weight,
            scale=f"{scale}.to(torch.float32)",
            zero=zero,
            group=self.group,
        )

    def reference(self, inputs: list[str], result: str) -> str:
        """A whole module; `result`: the line that returns what is made of `w`."""
        rows, columns = self.packed.shape
        names = ", ".join(self.inputs())
        return self.unpacking() + RUN.format(
            inputs=", ".join(inputs), rows=rows, columns=columns, weight_inputs=names, result=result
        )


def awq_weight(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> PackedWeight:
    (k, words), groups = packed.shape, scale.shape[0]
    texts = AWQ_WEIGHT, PLAIN_SCALE, AWQ_ZERO.format(group=k // groups)
    return PackedWeight("awq", k, words * 8, 4, packed, scale, zero, texts)


def gptq_weight(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, offset: int) -> PackedWeight:
    """`offset`: what GPTQ's first format takes off a zero point before it is packed."""
    words, n = packed.shape
    texts = GPTQ_WEIGHT, PLAIN_SCALE, GPTQ_ZERO.format(group=8 * words // scale.shape[0], offset=offset)
    return PackedWeight("gptq" if offset else "gptq_v2", 8 * words, n, 4, packed, scale, zero, texts)


def cpu_weight(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> PackedWeight:
    n, k = 16 * packed.shape[0], packed.shape[1] // 2
    zeros = "    zero = 8\n" if zero is None else CPU_ZERO.format(group=k // scale.shape[0])
    return PackedWeight("cpu", k, n, 4, packed, scale, zero, (CPU_WEIGHT.format(n=n, k=k), PLAIN_SCALE, zeros))


def scalar_type_of(number: int) -> tuple[int, int]:
    """Bits and bias of an unsigned integer by vLLM's id of its type; Unrecognized for any other type.

    The id has exponent and mantissa of eight bits each, a sign, a bias of 32 bits, and more that is of floats.
    """
    exponent, bits, signed, bias = (number >> at & mask for at, mask in ((0, 255), (8, 255), (16, 1), (17, 2**32 - 1)))
    if exponent or signed:
        raise Unrecognized("its weight is not of unsigned integers")
    return bits, bias


def marlin_weight(
    k: int, n: int, scalar_type: int, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> PackedWeight:
    """`scalar_type`: vLLM's id of the weight's type."""
    bits, bias = scalar_type_of(scalar_type)
    if bits not in MARLIN_ORDERS or (bias == 0) != (zero is not None):
        raise Unrecognized("its weight is of floats, or has both a bias and zero points")
    if k % 16 or n % 64 or scale.shape[0] == 0:
        raise Unrecognized("its weight is not of whole tiles")
    held, order = MARLIN_ORDERS[bits]
    group = k // scale.shape[0]
    texts = (
        MARLIN_WEIGHT.format(held=held, bits=bits, k=k, n=n),
        MARLIN_CHANNEL_SCALE if group == k else MARLIN_SCALE,
        MARLIN_ZERO.format(bits=bits, word=32 // bits, order=order, group=group)
        if zero is not None
        else f"    zero = {bias}\n",
    )
    return PackedWeight("marlin", k, n, bits, packed, scale, zero, texts)

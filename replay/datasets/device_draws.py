"""The inputs of many invocations, drawn on a GPU: as float_draws.cpp draws floats, each kind by one Triton kernel.

Each number is a function of a stream, an invocation's number and a place (SplitMix64; Steele, Lea and Flood, 2014). So
that an invocation that is drawn alone has the same bits as among others, nothing is reduced, for the order of a sum
depends on sizes, and no product is fused with a sum. The words are those of float_draws.cpp; what is made of them may
differ in its last bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kcap.replay.rebuild.rebuild import OF_BOOLS, IntegerRange

BLOCK = 1024  # elements of a program
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
BIT_OF_BOOLS = OF_BOOLS[1].bit_length() - 1  # their highest


def fill_floats(
    place: torch.Tensor,
    pool: torch.Tensor,
    spread: tuple[float, float, float],
    row: tuple[int, int, int],
    stream: int,
    first: int,
) -> None:
    """Fill `place`, [invocations, elements], with floats of the invocations from number `first` on.

    `pool`: [pieces, elements of a piece] in float32; `spread`: octaves, offset and outlier, as
    kcap.replay.datasets.spreads.Spread has them; `row`: its elements, its parts, and the elements of the shortest
    with an outlier.
    """
    (octaves, offset, outlier), (width, parts, shortest) = spread, row
    largest = math.sqrt(width) * outlier if width >= shortest else 0.0
    _launch(_floats, place, pool, *pool.shape, width, width // parts, octaves, offset, largest, stream, first)


def fill_pieces(place: torch.Tensor, pool: torch.Tensor, stream: int, first: int) -> None:
    """Fill `place`, [invocations, bytes], with pieces of `pool`, [pieces, bytes of a piece], as they are."""
    _launch(_pieces, place, pool, *pool.shape, stream, first)


def fill_integers(place: torch.Tensor, span: IntegerRange, stream: int, first: int, width: int | None = None) -> None:
    """Fill `place`, [invocations, elements], with integers of `span`, or with bools by the highest bit of OF_BOOLS.

    `width`: elements of a row, each of which leaves out up to a quarter at either end; None: the whole span.
    """
    (low, high), bit = span, 0
    if place.dtype == torch.bool:
        place, bit = place.view(torch.uint8), BIT_OF_BOOLS
    count = high - low + 1
    most_left_out = 0 if width is None else count // 4
    _launch(_integers, place, low, count, most_left_out, width or place.shape[1], bit, stream, first)


def _launch(kernel: Any, place: torch.Tensor, *arguments: Any) -> None:
    programs = len(place) * triton.cdiv(place.shape[1], BLOCK)
    with torch.cuda.device_of(place):
        kernel[(programs,)](place, place.stride(0), place.shape[1], *arguments, BLOCK, enable_fp_fusion=False)


# No value is a constant of a kernel, or known to be a multiple of anything: what is drawn hangs on none of that.
_compiled = triton.jit(
    do_not_specialize=[
        "stride", "size", "pieces", "piece", "width", "part", "low", "count", "most_left_out", "bit", "stream",
        "first",
    ]
)  # fmt: skip


@triton.jit
def _mixed(word):
    """SplitMix64's finalizer: each bit of a word depends on all bits of what it is made of."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _word(stream, number, place):
    """Of a place of an invocation."""
    start = _mixed(stream + number * GOLDEN)
    return _mixed(start + (place.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def _high(word):
    """A number of [0, 1), of the upper bits."""
    return (word >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _low(word):
    """Another, of those below them."""
    return ((word >> 16) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _below(word, limit):
    """An integer of [0, limit), of the upper 32 bits."""
    return ((word >> 32) * limit.to(tl.uint64)) >> 32


@triton.jit
def _elements(place, stride, size, first, BLOCK: tl.constexpr):
    """Of this program: where they are, which of their invocation's, which of them there are, and its number."""
    blocks = (size - 1) // BLOCK + 1
    invocation = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(size.dtype) * BLOCK + tl.arange(0, BLOCK)
    return place + invocation * stride + at, at, at < size, first.to(tl.uint64) + invocation.to(tl.uint64)


@_compiled
def _floats(
    place, stride: tl.int64, size, pool, pieces, piece, width, part, octaves, offset, largest, stream: tl.uint64,
    first: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    target, at, there, number = _elements(place, stride, size, first, BLOCK)
    of_pieces = stream.to(tl.uint64)
    of_rows = _mixed(of_pieces)
    overall = _mixed(of_rows)
    of_outliers = _mixed(overall)
    of_parts = _mixed(of_outliers)
    row = at // width
    word = _word(of_rows, number, row)
    scale = tl.exp2(octaves * 2 * (_high(word) + _high(_word(overall, number, at * 0)) - 1))
    uneven = _word(of_parts, number, at // part)
    own = scale * tl.exp2(octaves * (2 * _high(uneven) - 1))
    moved = offset * ((2 * _low(word) - 1) * scale + (_low(uneven) - 0.5) * own)
    chosen = _below(_word(of_pieces, number, at // piece), pieces).to(tl.int64)
    value = tl.load(pool + chosen * piece + at % piece, mask=there, other=0.0) * own + moved
    word = _word(of_outliers, number, row)
    outlier = largest * tl.exp2(-2 * _low(word)) * scale
    outlier = tl.where((word & 1) != 0, outlier, -outlier)
    has_one = (largest != 0) & ((word & 2) != 0) & (_below(word, width) == (at % width).to(tl.uint64))
    tl.store(target, tl.where(has_one, outlier, value).to(place.dtype.element_ty), mask=there)


@_compiled
def _pieces(
    place, stride: tl.int64, size, pool, pieces, piece, stream: tl.uint64, first: tl.int64, BLOCK: tl.constexpr
):  # fmt: skip
    target, at, there, number = _elements(place, stride, size, first, BLOCK)
    chosen = _below(_word(stream.to(tl.uint64), number, at // piece), pieces).to(tl.int64)
    tl.store(target, tl.load(pool + chosen * piece + at % piece, mask=there, other=0), mask=there)


@_compiled
def _integers(
    place, stride: tl.int64, size, low: tl.int64, count: tl.int64, most_left_out, width, bit, stream: tl.uint64,
    first: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    target, at, there, number = _elements(place, stride, size, first, BLOCK)
    of_elements = stream.to(tl.uint64)
    moves = _word(_mixed(of_elements), number, at // width)
    below = _below(moves, most_left_out + 1).to(tl.int64)
    above = _below(moves << 32, most_left_out + 1).to(tl.int64)
    value = _below(_word(of_elements, number, at), count - below - above).to(tl.int64) + low + below
    tl.store(target, (value >> bit).to(place.dtype.element_ty), mask=there)

"""The inputs of many invocations, drawn on a GPU: as float_draws.cpp draws floats, by torch's own kernels.

Each number is a function of a stream, an invocation's number and a place (SplitMix64; Steele, Lea and Flood, 2014), so
that an invocation that is drawn alone has the same bits as among others. The words are those of float_draws.cpp; what
is made of them may differ in its last bit. Nothing is reduced: the order of a sum depends on sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

GOLDEN = 0x9E3779B97F4A7C15
TILE = 1 << 25  # elements that are drawn at a time
IntegerRange: TypeAlias = tuple[int, int]  # the least and the greatest
OF_BOOL = (0, 255)  # what bools are made of


@dataclass(frozen=True)
class RowShape:
    """Of a tensor's rows: how many, elements of each, parts of each, and of the shortest with an outlier."""

    rows: int
    width: int
    parts: int
    shortest_with_outlier: int


def fill_floats(
    place: torch.Tensor,
    pool: torch.Tensor,
    spread: tuple[float, float, float],
    shape: RowShape,
    stream: int,
    first: int,
) -> None:
    """Fill `place`, [invocations, elements], with floats of the invocations from number `first` on.

    `pool`: [pieces, elements of a piece] in float32; `spread`: octaves, offset and outlier, as
    kcap.replay.datasets.spreads.Spread has them.
    """
    streams = [stream & _MASK]
    for _ in range(4):
        streams.append(_mixed_int(streams[-1]))
    high = max(min(TILE // max(shape.width, 1), shape.rows), 1)
    many = max(TILE // max(shape.rows * shape.width, 1), 1)
    for begin in range(0, len(place), many):
        part = place[begin : begin + many]
        starts = [_starts(one, first + begin, len(part), place.device) for one in streams]
        for row in range(0, shape.rows, high):
            rows = range(row, min(row + high, shape.rows))
            _fill_rows(part[:, rows.start * shape.width : rows.stop * shape.width], rows, pool, spread, shape, starts)


def fill_pieces(place: torch.Tensor, pool: torch.Tensor, stream: int, first: int) -> None:
    """Fill `place`, [invocations, bytes], with pieces of `pool`, [pieces, bytes of a piece], as they are."""
    size, piece = place.shape[1], pool.shape[1]
    many = max(TILE // max(size, 1), 1)
    for begin in range(0, len(place), many):
        part = place[begin : begin + many]
        starts = _starts(stream, first + begin, len(part), place.device)
        words = _words(starts, torch.arange(-(-size // piece), device=place.device))
        part.copy_(pool[_below(words, len(pool))].flatten(1)[:, :size])


def fill_integers(place: torch.Tensor, span: IntegerRange, stream: int, first: int, width: int | None = None) -> None:
    """Fill `place`, [invocations, elements], with integers of `span`, or so many that `as_integers` makes bools.

    `width`: elements of a row, each of which leaves out up to a quarter at either end; None: the whole span.
    """
    size, (low, high) = place.shape[1], span
    many = max(TILE // max(size, 1), 1)
    for begin in range(0, len(place), many):
        part = place[begin : begin + many]
        starts, of_rows = (
            _starts(one, first + begin, len(part), place.device) for one in (stream, _mixed_int(stream & _MASK))
        )
        for at in range(0, size, TILE):
            columns = torch.arange(at, min(at + TILE, size), device=place.device)
            count, least = high - low + 1, low
            if width is not None:
                moves = _words(of_rows, columns // width)
                least = low + _below(moves, count // 4 + 1)
                count = count - (least - low) - _below(moves << 32, count // 4 + 1)
            part[:, at : at + len(columns)] = as_integers(_below(_words(starts, columns), count) + least, place.dtype)


def as_integers(drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is stored as `dtype`: numbers as they are; of OF_BOOL, whether they are in its upper half."""
    return drawn > OF_BOOL[1] // 2 if dtype == torch.bool else drawn


def _fill_rows(
    place: torch.Tensor,
    rows: range,
    pool: torch.Tensor,
    spread: tuple[float, float, float],
    shape: RowShape,
    starts: list[torch.Tensor],
) -> None:
    """Fill `place`, [invocations, rows * width], with the rows `rows` of some invocations."""
    octaves, offset, outlier = spread
    in_pieces, of_rows, overall, of_outliers, of_parts = starts
    width, parts, piece, device = shape.width, shape.parts, pool.shape[1], pool.device
    row_places = torch.arange(rows.start, rows.stop, device=device)
    words = _words(of_rows, row_places)
    all_of_it = _high(_words(overall, torch.zeros(1, dtype=torch.int64, device=device)))
    scale = torch.exp2(octaves * 2 * (_high(words) + all_of_it - 1))
    uneven = _words(of_parts, torch.arange(rows.start * parts, rows.stop * parts, device=device))
    uneven = uneven.view(len(uneven), len(rows), parts)
    own = scale[..., None] * torch.exp2(octaves * (2 * _high(uneven) - 1))
    moved = offset * ((2 * _low(words) - 1)[..., None] * scale[..., None] + (_low(uneven) - 0.5) * own)
    begin, end = rows.start * width, rows.stop * width
    pieces = torch.arange(begin // piece, -(-end // piece), device=device)
    chosen = _below(_words(in_pieces, pieces), len(pool))
    skipped = begin % piece
    numbers = pool[chosen].flatten(1)[:, skipped : skipped + end - begin].reshape(-1, len(rows), parts, width // parts)
    torch.add(numbers.mul_(own[..., None]), moved[..., None], out=place.view(numbers.shape))
    if width >= shape.shortest_with_outlier and outlier:
        words = _words(of_outliers, row_places)
        size = math.sqrt(width) * outlier * torch.exp2(-2 * _low(words)) * scale
        column, whole = _below(words, width)[..., None], place.view(-1, len(rows), width)
        signed = torch.where(words & 1 != 0, size, -size)[..., None].to(place.dtype)
        whole.scatter_(2, column, torch.where((words & 2 != 0)[..., None], signed, whole.gather(2, column)))


_MASK = (1 << 64) - 1
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mixed_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX[0]) & _MASK
    word = ((word ^ (word >> 27)) * _MIX[1]) & _MASK
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The same bits as an int64."""
    return (word & _MASK) - ((word & (1 << 63)) << 1)


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def mixed_words(word: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, of int64: each bit of a word depends on all bits of what it is made of."""
    word = (word ^ _shifted(word, 30)) * _signed(_MIX[0])
    word = (word ^ _shifted(word, 27)) * _signed(_MIX[1])
    return word ^ _shifted(word, 31)


def _starts(stream: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Where the words of each of `count` invocations begin, [invocations, 1]."""
    numbers = torch.arange(first, first + count, device=device)[:, None]
    return mixed_words(numbers * _signed(GOLDEN) + _signed(stream))


def _words(starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[invocations, places]."""
    return mixed_words(starts + (places + 1) * _signed(GOLDEN))


def _high(word: torch.Tensor) -> torch.Tensor:
    """A number of [0, 1), of the upper bits."""
    return _shifted(word, 40).float() * 2.0**-24


def _low(word: torch.Tensor) -> torch.Tensor:
    """Another, of those below them."""
    return (_shifted(word, 16) & 0xFFFFFF).float() * 2.0**-24


def _below(word: torch.Tensor, limit: int | torch.Tensor) -> torch.Tensor:
    """An integer of [0, limit), of the upper 32 bits."""
    return _shifted(_shifted(word, 32) * limit, 32)

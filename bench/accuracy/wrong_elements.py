"""Which elements of an output are wrong, and where they lie: what a Solution's author needs to find the mistake.

The rule is that of `accuracy`: `wrong_elements` says more of an output that `accuracy.difference` found to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kcap.bench.accuracy import INTEGERS, RMS_SHARE, RTOL, SAME, FloatRows, difference
from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.results.outcome import WrongAxis, WrongElements

EDGE_SHARE = 4  # the wrong elements are a tail where they are at most a fourth of an axis, and reach its end
SCATTERED_SHARE = 2  # of an axis more than half, with gaps between
SHORTEST_TILE, LONGEST_TILE = 2, 1024
NO_AXES: tuple[str, ...] = ()


def wrong_elements(
    output: str, out: torch.Tensor, truth: torch.Tensor, axes: Sequence[str] = NO_AXES
) -> WrongElements | None:
    """What of `out` differs from `truth` by more than is allowed; None if nothing does, or they cannot be compared
    element by element (another shape, a packed dtype).

    `truth` has the dtype of `out`, or for a floating output any wider one. `axes`: the output's axes by name.
    """
    if out.shape != truth.shape or not out.numel() or difference(out, truth).error <= SAME:
        return None
    compared = _compare(out, truth)
    if compared is None:
        return None
    worst = int(compared.share.flatten().argmax())
    wrong = compared.share > 1
    count = int(wrong.sum())
    places = _axes(wrong, axes) if count else []
    return WrongElements(
        output=output,
        index=[int(i) for i in torch.unravel_index(torch.tensor(worst), out.shape)],
        expected=_number(truth, worst),
        found=_number(out, worst),
        tolerance=float(compared.allowed.flatten()[worst]),
        wrong=count,
        total=out.numel(),
        not_a_number=int(out.float().isnan().sum()) if out.dtype in RTOL else 0,
        axes=places,
        where=_describe(places, count, out.numel()) if count else AS_A_WHOLE,
    )


AS_A_WHOLE = "no element alone: all together are further off than rounding to the output's dtype explains"


@dataclass(frozen=True)
class _Compared:
    """Of each element: its error over what is allowed (above 1 it is wrong), and what is allowed."""

    share: torch.Tensor
    allowed: torch.Tensor


def _compare(out: torch.Tensor, truth: torch.Tensor) -> _Compared | None:
    """None where nothing can be said of single elements."""
    if out.dtype in RTOL and truth.is_floating_point():
        return _floating(out, truth)
    if truth.dtype != out.dtype:
        return None
    if out.dtype in INTEGERS:
        return _integers(out, truth)
    if raw_bytes(out).numel() != out.numel():
        return None
    differs = (raw_bytes(out) != raw_bytes(truth)).reshape(out.shape)
    return _Compared(differs.double() * 2, torch.zeros_like(differs, dtype=torch.double))


def _integers(out: torch.Tensor, truth: torch.Tensor) -> _Compared:
    differs = out != truth
    off = torch.where(differs, (out.double() - truth.double()).abs().clamp_min(1), 0)  # large int64 are no float64
    few = out.dtype == torch.int8 and int(differs.sum()) <= max(out.numel() // RMS_SHARE**2, 1)
    allowed = 1.0 if few else 0.0
    return _Compared(torch.where(off > allowed, off + 1, 0), torch.full_like(off, allowed))


def _floating(out: torch.Tensor, truth: torch.Tensor) -> _Compared:
    """Where the truth, rounded to the output's dtype, is inf or nan, only the same is right."""
    rows = FloatRows(out, truth)
    numbers = rows.numbers()
    tolerance = rows.allowed(numbers.truth)
    share = ((numbers.out - numbers.truth).abs() / tolerance).reshape(out.shape)
    if numbers.unlike is not None:
        share = torch.where(numbers.unlike.reshape(out.shape), torch.inf, share)
    allowed = torch.where(truth.to(out.dtype).double().isfinite(), tolerance.reshape(out.shape), 0.0)
    return _Compared(share, allowed)


def _number(tensor: torch.Tensor, flat: int) -> float | int | str:
    """An element for JSON, which has no inf and no nan."""
    element = tensor.flatten()[flat]
    if not (tensor.is_floating_point() or tensor.dtype in INTEGERS):
        return f"0x{int(raw_bytes(element.reshape(1))[0]):02x}"
    value = element.double().item() if tensor.is_floating_point() else element.item()
    if isinstance(value, bool):
        return int(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _axes(wrong: torch.Tensor, names: Sequence[str]) -> list[WrongAxis]:
    """For each axis, at which of its positions an element is wrong."""
    described = []
    for axis, size in enumerate(wrong.shape):
        others = [other for other in range(wrong.dim()) if other != axis]
        hit = wrong.any(dim=others) if others else wrong
        positions = hit.nonzero().flatten()
        first, last = int(positions[0]), int(positions[-1])
        name = names[axis] if axis < len(names) else ""
        described.append(
            WrongAxis(
                axis=name,
                size=size,
                first=first,
                last=last,
                positions=len(positions),
                tile=_tile(hit) if 1 < len(positions) < size else None,
            )
        )
    return described


def _tile(hit: torch.Tensor) -> int | None:
    """The length of tiles, a power of two, of which some are wrong from end to end and the others right; None where
    there is no such length above one position."""
    length, size = SHORTEST_TILE, len(hit)
    longest = None
    while length <= min(LONGEST_TILE, size // 2):
        parts = hit[: size - size % length].reshape(-1, length)
        pure = bool((parts.all(1) | ~parts.any(1)).all())
        rest = hit[size - size % length :]
        if not pure or (len(rest) and bool(rest.any()) and not bool(rest.all())):
            break
        longest, length = length, length * 2
    return longest


def _describe(axes: Sequence[WrongAxis], wrong: int, total: int) -> str:
    """In words: `rows 0 to 63 of 64; n 4064 to 4095 of 4096 (a tail)`."""
    if wrong == total:
        return "every element"
    parts = [_describe_axis(axis, number, len(axes)) for number, axis in enumerate(axes) if not _is_scattered(axis)]
    return "; ".join(parts) or "elements all over the output"


def _is_scattered(axis: WrongAxis) -> bool:
    """Whether elements are wrong nearly all along the axis, in no order that is known."""
    between = axis.last - axis.first + 1
    return axis.positions == axis.size or (
        axis.tile is None and axis.positions < between and axis.positions * SCATTERED_SHARE > axis.size
    )


def _describe_axis(axis: WrongAxis, number: int, count: int) -> str:
    name = axis.axis or ("row" if count == 2 and number == 0 else "column" if count == 2 else f"axis {number}")
    if axis.positions == 1:
        edge = " (the last)" if axis.first == axis.size - 1 else ""
        return f"{name} {axis.first} alone of {axis.size}{edge}"
    whole = axis.positions == axis.last - axis.first + 1
    plural = "" if axis.axis or name.startswith("axis") else "s"
    text = f"{name}{plural} {axis.first} to {axis.last} of {axis.size}"
    if whole and axis.last == axis.size - 1 and axis.positions * EDGE_SHARE <= axis.size:
        return f"{text} (a tail)"
    if whole:
        return text
    tiles = f", in tiles of {axis.tile}" if axis.tile else ""
    return f"{text} ({axis.positions} of them{tiles})"

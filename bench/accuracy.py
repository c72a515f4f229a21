"""How far a kernel's outputs are from the truth, in units of what their dtype allows. Above 1 they are wrong.

One rule for both who ask: the judge, of a Solution against the reference in higher precision, and the reference check,
of the engine's operator against the reference. `difference` is the larger of two errors of a floating output:

    of an element      |out - truth| over  rtol * |truth| + rtol * rms(truth)
    of the whole       rms(out - truth) over  rtol / 4 * rms(truth)

The rms in the first is for sums that cancel: their error is that of what was added. The second tells arithmetic in the
output's dtype, which stays well below it, from arithmetic in a lower one. Where the truth, rounded to the output's
dtype, is inf or nan the output must be the same. An int8 output stands for rounded numbers, and may be off by one in
one element of sixteen. All else (integers, booleans, packed and scale dtypes) must hold the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.results.outcome import Accuracy

SAME = 1.0  # the largest error that passes

# About four units in the last place, for a result that was accumulated in float32 and rounded once or twice
RTOL = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,  # the order of a long sum
    torch.float16: 4e-3,
    torch.bfloat16: 3.2e-2,
    torch.float8_e4m3fn: 0.25,
    torch.float8_e5m2: 0.5,
}
RMS_SHARE = 4  # the root mean square error may be a fourth of `rtol`, and of int8's last place
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TINY = 1e-30


@dataclass(frozen=True)
class Difference:
    """Of one output. `error`: the larger of its two, in units of what is allowed."""

    error: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0


INCOMPARABLE = Difference(math.inf, math.inf, math.inf)


def difference(out: torch.Tensor, truth: torch.Tensor) -> Difference:
    """`out` against `truth`, which has the same shape and the same dtype, or float64 for a floating output."""
    dtypes = (out.dtype, torch.float64) if out.dtype in RTOL else (out.dtype,)
    if out.shape != truth.shape or truth.dtype not in dtypes:
        return INCOMPARABLE
    if not truth.numel():
        return Difference()
    return _rounded(out, truth) if out.dtype in RTOL else _exact(out, truth)


def worst_accuracy(differences: Sequence[Difference], allowed: str, truth: str, timed: int) -> Accuracy:
    """The worst of all. `timed`: how many timed invocations were compared."""
    return Accuracy(
        error=max((difference.error for difference in differences), default=0.0),
        max_absolute_error=max((difference.absolute for difference in differences), default=0.0),
        max_relative_error=max((difference.relative for difference in differences), default=0.0),
        compared=timed,
        allowed=allowed,
        truth=truth,
    )


def describe_tolerances(dtypes: Sequence[torch.dtype]) -> str:
    """In words, what each output may be off by."""
    words = []
    for dtype in dict.fromkeys(dtypes):
        name = str(dtype).removeprefix("torch.")
        if dtype in RTOL:
            rtol = RTOL[dtype]
            words.append(f"{name}: {rtol:g} of the element + {rtol:g} rms, rms error {rtol / RMS_SHARE:g}")
        else:
            words.append(f"{name}: {f'1 in one of {RMS_SHARE**2}' if dtype == torch.int8 else 'equal'}")
    return "; ".join(words)


def _exact(out: torch.Tensor, truth: torch.Tensor) -> Difference:
    if torch.equal(raw_bytes(out), raw_bytes(truth)):
        return Difference()
    if out.dtype not in INTEGERS:
        return INCOMPARABLE
    differs = out != truth
    off = torch.where(differs, (out.double() - truth.double()).abs().clamp_min(1), 0)  # large int64 are no float64
    worst, relative = float(off.max()), float((off / truth.double().abs().clamp_min(1)).max())
    few = max(out.numel() // RMS_SHARE**2, 1)
    fine = not worst or (out.dtype == torch.int8 and worst <= 1 and int(differs.sum()) <= few)
    return Difference(0.0 if fine else math.inf, worst, relative)


def _rounded(out: torch.Tensor, truth: torch.Tensor) -> Difference:
    rtol, working = RTOL[out.dtype], torch.float64 if out.dtype == torch.float64 else torch.float32
    wide_out, wide_truth = out.to(working), truth.to(working)
    rounded = truth.to(out.dtype).to(working)  # inf, where the dtype does not reach as far
    finite = rounded.isfinite()
    if bool(finite.all()) and bool(wide_out.isfinite().all()):
        return _finite(wide_out, wide_truth, rtol)
    if not wide_out[finite].isfinite().all() or not _same_specials(wide_out[~finite], rounded[~finite]):
        return INCOMPARABLE
    return _finite(wide_out[finite], wide_truth[finite], rtol)


def _same_specials(out: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Whether inf and nan are the same in both."""
    return bool(torch.equal(out.isnan(), rounded.isnan()) and torch.equal(out.nan_to_num(0.0), rounded.nan_to_num(0.0)))


def _finite(out: torch.Tensor, truth: torch.Tensor, rtol: float) -> Difference:
    if not truth.numel():
        return Difference()
    off, size = (out - truth).abs_(), truth.abs()
    rms = _rms(truth)
    whole = _rms(off) / max(rtol / RMS_SHARE * rms, TINY)
    worst, relative = float(off.max()), float((off / size.clamp_min(TINY)).max())
    elements = float(off.div_(size.add_(rms).mul_(rtol).clamp_min_(TINY)).max())
    return Difference(max(elements, whole), worst, relative)


def _rms(tensor: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return norm / math.sqrt(tensor.numel())

"""How far a kernel's outputs are from the truth, in units of what is allowed: by dtype, for values of any size.

A floating output may be off in each element by `rtol` of the element and as much of the root mean square of the whole:
|out - truth| <= rtol * |truth| + rtol * rms(truth). The second term is for sums that cancel: their error is that of what
was added. Where the truth is inf or nan the output must be the same.

`difference`, the judge's, also bounds the root mean square error of the whole by a quarter of `rtol`: arithmetic in the
output's dtype stays well below that, arithmetic in a lower one does not. It lets int8 be off by one in one element of
sixteen, for it stands for rounded numbers. `greatest_error`, which verifies references, has neither of these rules;
other integers must be equal in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.results.outcome import Accuracy

# About four units in the last place, for a result that was accumulated in float32 and rounded once or twice
RTOL = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,  # the order of a long sum
    torch.float16: 4e-3,
    torch.bfloat16: 3.2e-2,
    torch.float8_e4m3fn: 0.25,
    torch.float8_e5m2: 0.5,
}


def greatest_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The greatest error in units of what is allowed (1.0 and below: the same); inf where they cannot be compared.

    Integers, booleans and packed numbers must be equal. An inf or nan of the reference must be the same in the result.
    """
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return float("inf")
    if not ref.numel():
        return 0.0
    if ref.dtype not in RTOL:
        return 0.0 if torch.equal(raw_bytes(out), raw_bytes(ref)) else float("inf")
    return _relative_error(out.double(), ref.double(), RTOL[ref.dtype])


def _relative_error(out: torch.Tensor, ref: torch.Tensor, rtol: float) -> float:
    finite = ref.isfinite()
    if not torch.equal(out[~finite].nan_to_num(1.5), ref[~finite].nan_to_num(1.5)) or not out[finite].isfinite().all():
        return float("inf")
    ref, out = ref[finite], out[finite]
    allowed = rtol * (ref.abs() + ref.pow(2).mean().sqrt())
    error = (out - ref).abs()
    return float((error / allowed.clamp_min(1e-30)).max()) if ref.numel() else 0.0


RMS_SHARE = 4  # the root mean square error may be a fourth of `rtol`, and of int8's last place


TINY = 1e-30


@dataclass(frozen=True)
class Difference:
    """Of one output. `error`: the larger of its two, in units of what is allowed."""

    error: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0


def difference(out: torch.Tensor, truth: torch.Tensor) -> Difference:
    """`out`, of the Definition's dtype and shape, against `truth`, of the same or in float64."""
    if not truth.numel():
        return Difference()
    if not out.is_floating_point():
        return _exact(out, truth)
    rtol, working = RTOL[out.dtype], torch.float64 if out.dtype == torch.float64 else torch.float32
    found, right = out.to(working), truth.to(working)
    rounded = truth.to(out.dtype).to(working)  # inf, where the dtype does not reach as far
    finite = rounded.isfinite()
    if bool(finite.all()) and bool(found.isfinite().all()):
        return _close(found, right, rtol)
    if not _same_where_not(finite, found, rounded):
        return Difference(math.inf, math.inf, math.inf)
    return _close(found[finite], right[finite], rtol)


def worst_accuracy(differences: Sequence[Difference], allowed: str, truth: str, timed: int) -> Accuracy:
    """The worst of all. `timed`: how many timed invocations were compared."""
    return Accuracy(
        error=max((one.error for one in differences), default=0.0),
        max_absolute_error=max((one.absolute for one in differences), default=0.0),
        max_relative_error=max((one.relative for one in differences), default=0.0),
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
            words.append(
                f"{name}: {RTOL[dtype]:g} of the element + {RTOL[dtype]:g} rms, rms error {rms_bound(dtype):g}"
            )
        else:
            words.append(f"{name}: {f'1 in one of {RMS_SHARE**2}' if dtype == torch.int8 else 'equal'}")
    return "; ".join(words)


def rms_bound(dtype: torch.dtype) -> float:
    return RTOL[dtype] / RMS_SHARE


def _exact(out: torch.Tensor, truth: torch.Tensor) -> Difference:
    differs = out != truth
    off = torch.where(differs, (out.double() - truth.double()).abs().clamp_min(1), 0)  # large int64 are no float64
    worst, relative = float(off.max()), float((off / truth.double().abs().clamp_min(1)).max())
    few = max(out.numel() // RMS_SHARE**2, 1)
    fine = not worst or (out.dtype == torch.int8 and worst <= 1 and int(differs.sum()) <= few)
    return Difference(0.0 if fine else math.inf, worst, relative)


def _same_where_not(finite: torch.Tensor, out: torch.Tensor, rounded: torch.Tensor) -> bool:
    if not out[finite].isfinite().all():
        return False
    found, right = out[~finite], rounded[~finite]
    return bool(torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(0.0), right.nan_to_num(0.0)))


def _close(out: torch.Tensor, truth: torch.Tensor, rtol: float) -> Difference:
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

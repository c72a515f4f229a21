"""When two results of a kernel are the same: by dtype, for values of any size.

|out - ref| <= rtol * |ref| + rtol * rms(ref). The second term is for sums that cancel: their error is that of what was
added, which the root mean square of the whole result stands for.
"""

from __future__ import annotations

import torch

from kcap.bench.raw import raw_bytes

# About four units in the last place, for a result that was accumulated in float32 and rounded once or twice
RTOL = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,  # the order of a long sum
    torch.float16: 4e-3,
    torch.bfloat16: 3.2e-2,
    torch.float8_e4m3fn: 0.25,
    torch.float8_e5m2: 0.5,
}


def difference(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The greatest error in units of what is allowed (1.0 and below: the same); inf where they cannot be compared.

    Integers, booleans and packed numbers must be equal. An inf or nan of the reference must be the same in the result.
    """
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return float("inf")
    if not ref.numel():
        return 0.0
    if ref.dtype not in RTOL:
        return 0.0 if torch.equal(raw_bytes(out), raw_bytes(ref)) else float("inf")
    return _relative(out.double(), ref.double(), RTOL[ref.dtype])


def _relative(out: torch.Tensor, ref: torch.Tensor, rtol: float) -> float:
    finite = ref.isfinite()
    if not torch.equal(out[~finite].nan_to_num(1.5), ref[~finite].nan_to_num(1.5)) or not out[finite].isfinite().all():
        return float("inf")
    ref, out = ref[finite], out[finite]
    allowed = rtol * (ref.abs() + ref.pow(2).mean().sqrt())
    error = (out - ref).abs()
    return float((error / allowed.clamp_min(1e-30)).max()) if ref.numel() else 0.0

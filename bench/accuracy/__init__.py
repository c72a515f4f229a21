"""How far a kernel's outputs are from the truth, in units of what their dtype allows. Above 1 they are wrong.

One rule for both who ask: the judge, of a Solution against the reference in higher precision, and the reference check,
of the engine's operator against the reference. The error of a floating output is the largest of all its rows:

    of an element      |out - truth| over  rtol * |truth| + rtol * rms(row of truth)
    of a row           rms(out - truth) over  rtol / 4 * rms(row of truth)

A row is the last dimension; where that is shorter than 16, the whole output. The rms in the first is for sums that
cancel: their error is that of what was added. The second tells arithmetic in the output's dtype, which stays well below
it, from arithmetic in a lower one. A row's rms counts as a thirty-second of the usual row's at least.

Nobody need be better than the reference itself: where that, run in the dtype of its inputs (`own`), is far from the
truth, an element may be off by four times the largest error of its row, and a row by three times its rms, or three
times the usual row's. Where the truth is inf or nan the output must be the same; at the very end of the dtype's range
inf and a number are both right.

Indices that name the best of some scores (`Choice`) may name another of the same score, within its rounding. Other
integers must be equal, or lie between what the reference says in its two precisions; an int8 output stands for
rounded numbers, and may be off by one in one element of sixteen. Packed and scale dtypes must hold the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
SHORTEST_ROW = 16  # elements
LEAST_ROW = 1 / 32  # of the median of the rows' rms: not of the whole's, which one large row decides
OWN_ELEMENT, OWN_RMS = 4.0, 3.0  # times the reference's own error
RARE = 1e-6  # of the elements of an output that a threshold decides, to either side by rounding
OWN_RARE, MOST_RARE = 4, 1e-3  # times as many as are so in the reference; of all elements at most
CHOICE_RMS = 4.0  # times the rms of what the scores are rounded by
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TINY = 1e-30


@dataclass(frozen=True)
class Difference:
    """Of one output. `error`: the larger of its two, in units of what is allowed."""

    error: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0


INCOMPARABLE = Difference(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Choice:
    """What an output of indices was chosen by: `scores`, [rows, candidates], the larger the better.

    `own`: the same in the dtype of the reference's inputs. `ordered`: the best comes first.
    """

    scores: torch.Tensor
    own: torch.Tensor
    ordered: bool = True


@dataclass(frozen=True)
class Truth:
    """The right outputs. `own`: the reference's in the dtype of its inputs, where that is not what `outputs` are.

    `choices`: by the place of an output of indices.
    """

    outputs: list[torch.Tensor]
    own: list[torch.Tensor] | None = None
    choices: Mapping[int, Choice] = field(default_factory=dict)

    def differences(self, outputs: Sequence[torch.Tensor]) -> list[Difference]:
        """How far each of `outputs` is from it."""
        own = self.own or [None] * len(self.outputs)
        return [
            difference(out, truth, its_own, self.choices.get(place))
            for place, (out, truth, its_own) in enumerate(zip(outputs, self.outputs, own, strict=True))
        ]


def difference(
    out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None = None, choice: Choice | None = None
) -> Difference:
    """`out` against `truth`, which has the same shape and the same dtype, or float64 for a floating output."""
    dtypes = (out.dtype, torch.float64) if out.dtype in RTOL else (out.dtype,)
    if out.shape != truth.shape or truth.dtype not in dtypes:
        return INCOMPARABLE
    if not truth.numel():
        return Difference()
    if out.dtype in RTOL:
        return _rounded(out, truth, own)
    return _exact(out, truth, own) if choice is None else _chosen(out, truth, choice)


def compare(out: torch.Tensor, reference: torch.Tensor, choice: Choice | None = None) -> Difference:
    """An operator's output against another's that stands for it, in the operator's dtype both.

    All of it is one row: both round on the way, and which of a row's numbers they round apart is chance.
    """
    if out.dtype != reference.dtype or out.shape != reference.shape:
        return INCOMPARABLE
    return difference(out.reshape(-1), reference.reshape(-1), None, choice)


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
            words.append(f"{name}: {rtol:g} of the element + {rtol:g} of its row's rms, rms error {rtol / RMS_SHARE:g}")
        else:
            words.append(f"{name}: {f'1 in one of {RMS_SHARE**2}' if dtype == torch.int8 else 'equal'}")
    return "; ".join(words)


def _exact(out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None) -> Difference:
    if torch.equal(raw_bytes(out), raw_bytes(truth)):
        return Difference()
    if out.dtype not in INTEGERS:
        return INCOMPARABLE
    differs = out != truth
    off = torch.where(differs, (out.double() - truth.double()).abs().clamp_min(1), 0)  # large int64 are no float64
    worst, relative = float(off.max()), float((off / truth.double().abs().clamp_min(1)).max())
    if own is not None:
        between = (out >= torch.minimum(own, truth)) & (out <= torch.maximum(own, truth))
        differs, off = differs & ~between, torch.where(between, 0, off)
    rare = _rare(own != truth) if own is not None and not torch.equal(own, truth) else 0
    few = max(out.numel() // RMS_SHARE**2, 1) if out.dtype == torch.int8 and float(off.max()) <= 1 else rare
    return Difference(0.0 if int(differs.sum()) <= few else math.inf, worst, relative)


def _rare(own_differs: torch.Tensor) -> int:
    """How many elements a threshold may decide otherwise, where it does so in these of the reference's own."""
    size = own_differs.numel()
    return int(min(OWN_RARE * int(own_differs.sum()), MOST_RARE * size) + RARE * size)


def _chosen(out: torch.Tensor, truth: torch.Tensor, choice: Choice) -> Difference:
    """Right are distinct indices whose scores are those of the truth's, each within its rounding."""
    scores, own = choice.scores, choice.own.double()
    rows, candidates = scores.shape
    ours, theirs = out.reshape(rows, -1).long(), truth.reshape(rows, -1).long()
    worst = float((ours - theirs).abs().max())
    wrong = Difference(math.inf, worst, worst)
    if bool(((ours < 0) | (ours >= candidates)).any()):
        return wrong
    ranked = ours.sort(dim=-1).values
    if bool((ranked[:, 1:] == ranked[:, :-1]).any()):
        return wrong
    off = torch.where(scores == own, 0.0, (own - scores).abs()).nan_to_num(0.0, posinf=0.0)
    rms = off.pow(2).mean(dim=-1, keepdim=True).sqrt()
    rounding = off.gather(-1, torch.cat([ours, theirs], dim=-1)).amax(dim=-1, keepdim=True) + CHOICE_RMS * rms
    got, right = scores.gather(-1, ours), scores.gather(-1, theirs)
    if not choice.ordered:
        got, right = got.sort(dim=-1).values, right.sort(dim=-1).values
    same = (got == right) | ((got - right).abs() <= 2 * rounding) | (got.isnan() & right.isnan())
    return Difference(0.0, worst, worst) if bool(same.all()) else wrong


@dataclass(frozen=True)
class FloatRows:
    """A floating output beside the truth, each [rows, elements], with zeros where either has no number.

    `element` and `row`: what each element and each row's rms may be off by. `unlike`: where inf or nan are not as they
    must be, in the output's shape, of which `rare` are allowed; None where there are none.
    """

    out: torch.Tensor
    truth: torch.Tensor
    element: torch.Tensor
    row: torch.Tensor
    unlike: torch.Tensor | None = None
    rare: int = 0


def float_rows(out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None = None) -> FloatRows:
    """`out` against `truth`, as for `difference`."""
    rtol, working = RTOL[out.dtype], torch.float64 if out.dtype == torch.float64 else torch.float32
    wide_out, wide_truth = out.to(working), truth.to(working)
    rounded = truth.to(out.dtype).to(working)  # inf, where the dtype does not reach as far
    wide_own = rounded if own is None else own.to(working)
    most, size = torch.finfo(out.dtype).max, wide_truth.abs()
    edge = (size > (1 - rtol) * most) & (size < (1 + rtol) * most) & (wide_out * wide_truth.sign() > (1 - rtol) * most)
    finite, finite_out = rounded.isfinite(), wide_out.isfinite()
    unlike, rare = None, 0
    if not bool(finite.all()) or not bool(finite_out.all()):
        unlike = ~(_same_specials(wide_out, rounded) | _same_specials(wide_out, wide_own) | edge)
        rare = _rare(wide_own.isfinite() != finite)
    compared = finite & finite_out
    wide_own = torch.where(wide_own.isfinite(), wide_own, wide_truth)
    shape = (-1, out.shape[-1]) if out.dim() and out.shape[-1] >= SHORTEST_ROW else (1, -1)
    out_rows, truth_rows, own_rows = (
        torch.where(compared, tensor, 0).reshape(shape) for tensor in (wide_out, wide_truth, wide_own)
    )
    tiny = max(torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps, TINY)
    row, element = _allowed(truth_rows, None if own is None else own_rows, rtol, tiny)
    return FloatRows(out_rows, truth_rows, element, row, unlike, rare)


def _same_specials(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where both are finite, or inf or nan the same."""
    return (out.isfinite() & truth.isfinite()) | (out == truth) | (out.isnan() & truth.isnan())


def _allowed(
    truth: torch.Tensor, own: torch.Tensor | None, rtol: float, tiny: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row's rms and of each element. `tiny`: what rounds to nothing in the output's dtype."""
    rms = _rms(truth)
    rms.clamp_min_(LEAST_ROW * float(rms.median()))
    row, element = (rms * (rtol / RMS_SHARE)).clamp_min_(tiny), truth.abs().add_(rms).mul_(rtol).add_(tiny)
    if own is None:
        return row, element
    own_off = (own - truth).abs_()
    own_row = _rms(own_off)
    usual = (own_row / rms.clamp_min(TINY)).median() * rms
    row = torch.maximum(row, OWN_RMS * torch.maximum(own_row, usual))
    return row, torch.maximum(element, OWN_ELEMENT * own_off.amax(dim=-1, keepdim=True))


def _rounded(out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None) -> Difference:
    rows = float_rows(out, truth, own)
    if rows.unlike is not None and int(rows.unlike.sum()) > rows.rare:
        return INCOMPARABLE
    off = (rows.out - rows.truth).abs_()
    worst, relative = float(off.max()), float((off / rows.truth.abs().clamp_min_(TINY)).max())
    return Difference(max(float((off / rows.element).max()), float((_rms(off) / rows.row).max())), worst, relative)


def _rms(rows: torch.Tensor) -> torch.Tensor:
    """Of each row, [rows, 1]."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
    return (norm / math.sqrt(max(rows.shape[-1], 1))).to(rows.dtype)

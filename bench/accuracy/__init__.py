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
from collections.abc import Iterator, Mapping, Sequence
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
CPU_TILE, GPU_TILE = 1 << 14, 1 << 25  # elements that are compared at a time
ALL = slice(None)


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
    if choice is not None and out.dtype not in RTOL:
        return _chosen(out, truth, choice)
    if out.dtype == truth.dtype and torch.equal(raw_bytes(out), raw_bytes(truth)):
        return Difference()
    if out.dtype not in RTOL:
        return _exact(out, truth, own)
    return Difference() if _same_numbers(out, truth) else _rounded(out, truth, own)


def compare(
    out: torch.Tensor, reference: torch.Tensor, choice: Choice | None = None, truth: torch.Tensor | None = None
) -> Difference:
    """An operator's output against another's that stands for it, in the operator's dtype both.

    All of it is one row: both round on the way, and which of a row's numbers they round apart is chance. `truth`: of a
    floating output in float64, where it may be as far off as `reference` is, by the rule of a Solution's.
    """
    if out.dtype != reference.dtype or out.shape != reference.shape:
        return INCOMPARABLE
    if truth is not None and out.dtype in RTOL and truth.shape == out.shape:
        return difference(out.reshape(-1), truth.reshape(-1), reference.reshape(-1))
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
    if out.dtype not in INTEGERS:
        return INCOMPARABLE
    differs = out != truth
    off = torch.where(differs, (out.double() - truth.double()).abs().clamp_min(1), 0)  # large int64 are no float64
    worst, relative = float(off.max()), float((off / truth.double().abs().clamp_min(1)).max())
    if own is not None:
        between = (out >= torch.minimum(own, truth)) & (out <= torch.maximum(own, truth))
        differs, off = differs & ~between, torch.where(between, 0, off)
    rare = _rare(int((own != truth).sum()), own.numel()) if own is not None and not torch.equal(own, truth) else 0
    few = max(out.numel() // RMS_SHARE**2, 1) if out.dtype == torch.int8 and float(off.max()) <= 1 else rare
    return Difference(0.0 if int(differs.sum()) <= few else math.inf, worst, relative)


def _rare(own_differs: int, size: int) -> int:
    """How many of `size` elements a threshold may decide otherwise, where it does so in `own_differs` of its own."""
    return int(min(OWN_RARE * own_differs, MOST_RARE * size) + RARE * size)


def _chosen(out: torch.Tensor, truth: torch.Tensor, choice: Choice) -> Difference:
    """Right are distinct indices whose scores are those of the truth's, each within its rounding."""
    count, candidates = choice.scores.shape
    ours, theirs = out.reshape(count, -1).long(), truth.reshape(count, -1).long()
    worst = float((ours - theirs).abs().max())
    wrong = Difference(math.inf, worst, worst)
    if bool(((ours < 0) | (ours >= candidates)).any()):
        return wrong
    ranked = ours.sort(dim=-1).values
    if bool((ranked[:, 1:] == ranked[:, :-1]).any()):
        return wrong
    high = max(_tile_size(out.device) // candidates, 1)
    parts = (slice(row, row + high) for row in range(0, count, high))
    same = all(_same_scores(ours[rows], theirs[rows], choice, rows) for rows in parts)
    return Difference(0.0, worst, worst) if same else wrong


def _same_scores(ours: torch.Tensor, theirs: torch.Tensor, choice: Choice, rows: slice) -> bool:
    scores, own = choice.scores[rows].double(), choice.own[rows].double()
    off = torch.where(scores == own, 0.0, (own - scores).abs()).nan_to_num(0.0, posinf=0.0)
    rms = off.pow(2).mean(dim=-1, keepdim=True).sqrt()
    rounding = off.gather(-1, torch.cat([ours, theirs], dim=-1)).amax(dim=-1, keepdim=True) + CHOICE_RMS * rms
    got, right = scores.gather(-1, ours), scores.gather(-1, theirs)
    if not choice.ordered:
        got, right = got.sort(dim=-1).values, right.sort(dim=-1).values
    same = (got == right) | ((got - right).abs() <= 2 * rounding) | (got.isnan() & right.isnan())
    return bool(same.all())


@dataclass(frozen=True)
class FloatNumbers:
    """A part of a floating output beside the truth and the reference's own, with zeros where either of the first two
    has no number.

    `unlike`: where inf or nan are not as they must be; None where there are none. `own_unlike`: in how many elements
    the reference's own has inf or nan where the truth has a number, or the other way round.
    """

    out: torch.Tensor
    truth: torch.Tensor
    own: torch.Tensor | None
    unlike: torch.Tensor | None = None
    own_unlike: int = 0


class FloatRows:
    """A floating output beside the truth, as for `difference`: what its rows and elements may be off by, and are.

    All is done a tile at a time, and in two passes: what an element may be off by depends on all rows.
    """

    def __init__(self, out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None = None) -> None:
        self.width = out.shape[-1] if out.dim() and out.shape[-1] >= SHORTEST_ROW else out.numel()
        self.dtype, self._rtol = out.dtype, RTOL[out.dtype]
        self._out, self._truth = out.reshape(-1, self.width), truth.reshape(-1, self.width)
        self._own = None if own is None else own.reshape(-1, self.width)
        self._tiny = max(torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps, TINY)
        norms = [torch.zeros(len(self._out), 1, dtype=torch.float64, device=out.device) for _ in range(3)]
        own_worst = torch.zeros_like(norms[0], dtype=self._working)
        unlike = own_unlike = 0
        worst, relative = list[torch.Tensor](), list[torch.Tensor]()
        for rows, columns in self._tiles():
            numbers = self.numbers(rows, columns)
            unlike += 0 if numbers.unlike is None else int(numbers.unlike.sum())
            own_unlike += numbers.own_unlike
            off = (numbers.out - numbers.truth).abs_()
            worst.append(off.max())
            relative.append((off / numbers.truth.abs().clamp_min_(TINY)).max())
            parts = [numbers.truth, off]
            if numbers.own is not None:
                parts.append((numbers.own - numbers.truth).abs_())
                own_worst[rows] = torch.maximum(own_worst[rows], parts[-1].amax(dim=-1, keepdim=True))
            for norm, part in zip(norms, parts, strict=False):
                added = torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float64)
                norm[rows] = torch.hypot(norm[rows], added)
        self.unlike = unlike > _rare(own_unlike, out.numel())
        self.worst, self.relative = float(torch.stack(worst).max()), float(torch.stack(relative).max())
        self._rms, self._off_rms, own_rms = ((norm / math.sqrt(self.width)).to(self._working) for norm in norms)
        self._rms.clamp_min_(LEAST_ROW * float(self._rms.median()))
        self._row, self._own_element = (self._rms * (self._rtol / RMS_SHARE)).clamp_min_(self._tiny), None
        if own is not None:
            usual = (own_rms / self._rms.clamp_min(TINY)).median() * self._rms
            self._row = torch.maximum(self._row, OWN_RMS * torch.maximum(own_rms, usual))
            self._own_element = OWN_ELEMENT * own_worst

    @property
    def error(self) -> float:
        """The larger of the two: of an element, and of a row."""
        elements = []
        for rows, columns in self._tiles():
            numbers = self.numbers(rows, columns)
            elements.append(((numbers.out - numbers.truth).abs_() / self.allowed(numbers.truth, rows)).max())
        return max(float(torch.stack(elements).max()), float((self._off_rms / self._row).max()))

    def numbers(self, rows: slice = ALL, columns: slice = ALL) -> FloatNumbers:
        out, truth = self._out[rows, columns], self._truth[rows, columns]
        own = None if self._own is None else self._own[rows, columns].to(self._working)
        wide_out, wide_truth, most = out.to(self._working), truth.to(self._working), torch.finfo(self.dtype).max
        if all(_within(numbers, most) for numbers in (wide_out, wide_truth, own) if numbers is not None):
            return FloatNumbers(wide_out, wide_truth, own)
        rounded = truth.to(self.dtype).to(self._working)  # inf, where the dtype does not reach as far
        wide_own = rounded if own is None else own
        size, low, high = wide_truth.abs(), (1 - self._rtol) * most, (1 + self._rtol) * most
        edge = (size > low) & (size < high) & (wide_out * wide_truth.sign() > low)
        finite = rounded.isfinite()
        unlike = ~(_same_specials(wide_out, rounded) | _same_specials(wide_out, wide_own) | edge)
        own_unlike = int((wide_own.isfinite() != finite).sum())
        compared = finite & wide_out.isfinite()
        wide_own = torch.where(wide_own.isfinite(), wide_own, wide_truth)
        wide_out, wide_truth, wide_own = (
            torch.where(compared, numbers, 0) for numbers in (wide_out, wide_truth, wide_own)
        )
        return FloatNumbers(wide_out, wide_truth, None if own is None else wide_own, unlike, own_unlike)

    def allowed(self, truth: torch.Tensor, rows: slice = ALL) -> torch.Tensor:
        """What each element of `rows` may be off by. `truth`: their FloatNumbers'."""
        allowed = truth.abs().add_(self._rms[rows]).mul_(self._rtol).add_(self._tiny)
        return allowed if self._own_element is None else torch.maximum(allowed, self._own_element[rows])

    @property
    def _working(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of parts that are compared at a time."""
        most = _tile_size(self._out.device)
        wide = min(self.width, most)
        high = most // wide
        for row in range(0, len(self._out), high):
            for column in range(0, self.width, wide):
                yield slice(row, row + high), slice(column, column + wide)


def _tile_size(device: torch.device) -> int:
    """In elements: a core's cache holds what is made of them, and torch uses no threads for so few; a GPU has room."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def _within(numbers: torch.Tensor, most: float) -> bool:
    """Whether all are numbers of at most that size."""
    low, high = numbers.aminmax()
    return bool((low >= -most) & (high <= most))


def _same_numbers(out: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether each number equals the truth's, of whatever dtype; zeros do with either sign, and nan does not."""
    parts = (each.reshape(-1).split(_tile_size(each.device)) for each in (out, truth))
    return all(torch.equal(ours.double(), theirs.double()) for ours, theirs in zip(*parts, strict=True))


def _same_specials(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where both are finite, or inf or nan the same."""
    return (out.isfinite() & truth.isfinite()) | (out == truth) | (out.isnan() & truth.isnan())


def _rounded(out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor | None) -> Difference:
    rows = FloatRows(out, truth, own)
    return INCOMPARABLE if rows.unlike else Difference(rows.error, rows.worst, rows.relative)

"""The figure of `kcap replay --fidelity`: every kernel replayed over the engine's, and the totals of each kind of step.

Needs matplotlib, which no other part of kcap does; no display.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from kcap.errors import CallError
from kcap.replay.fidelity.bars import BAND, COLORS, GREY, label, totals
from kcap.replay.fidelity.compare import KERNEL, Row, share_of
from kcap.replay.fidelity.verdict import Fidelity, KindFidelity

SIZE = (11.0, 4.8)  # inches
DPI = 200
LARGEST, SMALLEST = 420.0, 9.0  # areas of the dots in points², of a share of 1 and of next to nothing
NAMED = 6  # of the kernels that are outside the band
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def require() -> ModuleType:
    """matplotlib, or CallError with how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise CallError("a picture of the fidelity needs matplotlib: pip install kcap[plots]") from None
    return matplotlib


def draw(found: Fidelity, path: Path, heading: str = "") -> None:
    """Write the figure of `found` to `path`, a PNG; CallError where matplotlib is missing."""
    require().use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=SIZE, width_ratios=(1.0, 1.15), layout="constrained")
        fill(figure, axes, found, heading)
        figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
        pyplot.close(figure)


def fill(figure: Any, axes: Any, found: Fidelity, heading: str) -> None:
    """Kernels on the left of the two `axes`, totals on the right; below, what there was no colour for."""
    shown, rest = found.kinds[: len(COLORS)], found.kinds[len(COLORS) :]
    kernels(axes[0], shown)
    totals(axes[1], shown)
    if heading:
        figure.suptitle(heading, fontsize=10)
    if rest:
        share = share_of(sum(kind.steps * kind.serving.engine_us for kind in rest), found.engine_us())
        kinds = f"{len(rest)} more kind{'' if len(rest) == 1 else 's'} of steps"
        figure.supxlabel(f"not shown: {kinds}, {share:.1%} of the GPU time", fontsize=8, color=GREY)


def kernels(axes: Any, kinds: list[KindFidelity]) -> None:
    """One invocation of each Call: engine across, replay up, both logarithmic, and the band that a kernel may be in.

    Of each kind the state that its totals take, which the legend names.
    """
    points = [(kind, row) for kind in kinds for row in kind.best.rows if row.engine_us and row.replayed_us]
    low, high = _limits([time for _, row in points for time in _times(row)])
    edges = [low, high]
    axes.fill_between(edges, [x * (1 - KERNEL) for x in edges], [x * (1 + KERNEL) for x in edges], color=BAND)
    axes.plot(edges, edges, color=GREY, linewidth=0.8)
    for kind, color in zip(kinds, COLORS, strict=False):
        rows = [row for one, row in points if one is kind]
        xs, ys = [_times(row)[0] for row in rows], [_times(row)[1] for row in rows]
        axes.scatter(xs, ys, s=[_area(row.share) for row in rows], color=color, alpha=0.8, linewidth=0.4, edgecolor="w")
        axes.scatter([], [], color=color, label=_state(kind))
    _name(axes, [row for _, row in points if row.judged and not row.within])
    if kinds:
        axes.legend(fontsize=6.5, loc="upper left", handletextpad=0.1, borderaxespad=0.1)
    axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges, aspect="equal")
    axes.set(xlabel="in the engine, µs an invocation", ylabel="replayed, µs an invocation")
    axes.set_title(f"Kernels (area: share of GPU time; band: ±{KERNEL:.0%})", fontsize=9, loc="left")


def _state(kind: KindFidelity) -> str:
    """`decode, batch 16, full graphs: Program`."""
    return f"{', '.join(label(kind).splitlines())}: {kind.best.state}"


def _times(row: Row) -> tuple[float, float]:
    return row.engine_us / row.count, row.replayed_us / row.count


def _limits(times: list[float]) -> tuple[float, float]:
    return (min(times) / 1.6, max(times) * 1.6) if times else (1.0, 10.0)


def _area(share: float) -> float:
    return SMALLEST + (LARGEST - SMALLEST) * share


def _name(axes: Any, outside: list[Row]) -> None:
    for row in sorted(outside, key=lambda row: -row.share)[:NAMED]:
        above = (row.ratio or 0) > 1
        place, side = ((-6, 4), "right") if above else ((6, -4), "left")
        axes.annotate(
            row.call.operator,
            _times(row),
            place,
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=7,
            color=GREY,
        )

"""The figure of `kcap replay --fidelity`: every kernel replayed over the engine's, and the totals of each kind of step.

Needs matplotlib, which no other part of kcap does; no display.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kcap.errors import CallError
from kcap.replay.calls.report import duration
from kcap.replay.fidelity.compare import KERNEL_BOUND, TOTAL_BOUND, ComparedCall, share_of
from kcap.replay.fidelity.verdict import Fidelity, KindFidelity

FIGURE_SIZE = (11.0, 4.8)  # inches


FIGURE_DPI = 200


LARGEST, SMALLEST = 420.0, 9.0  # areas of the dots in points², of a share of 1 and of next to nothing


MOST_NAMED = 6  # of the kernels that are outside the band


FIGURE_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def require_matplotlib() -> ModuleType:
    """matplotlib, or CallError with how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise CallError("a picture of the fidelity needs matplotlib: pip install kcap[plots]") from None
    return matplotlib


def draw_figure(found: Fidelity, path: Path, heading: str = "") -> None:
    """Write the figure of `found` to `path`, a PNG; CallError where matplotlib is missing."""
    require_matplotlib().use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(FIGURE_STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=FIGURE_SIZE, width_ratios=(1.0, 1.15), layout="constrained")
        fill_figure(figure, axes, found, heading)
        figure.savefig(path, dpi=FIGURE_DPI, format="png", metadata={"Software": None})
        pyplot.close(figure)


def fill_figure(figure: Any, axes: Any, found: Fidelity, heading: str) -> None:
    """Kernels on the left of the two `axes`, totals on the right; below, what there was no colour for."""
    shown, rest = found.kinds[: len(KIND_COLORS)], found.kinds[len(KIND_COLORS) :]
    draw_kernels(axes[0], shown)
    draw_totals(axes[1], shown)
    if heading:
        figure.suptitle(heading, fontsize=10)
    if rest:
        share = share_of(sum(kind.steps * kind.serving.engine_us for kind in rest), found.engine_us())
        kinds = f"{len(rest)} more kind{'' if len(rest) == 1 else 's'} of steps"
        figure.supxlabel(f"not shown: {kinds}, {share:.1%} of the GPU time", fontsize=8, color=GREY)


def draw_kernels(axes: Any, kinds: list[KindFidelity]) -> None:
    """One invocation of each Call: engine across, replay up, both logarithmic, and the band that a kernel may be in.

    Of each kind the state that its totals take, which the legend names.
    """
    points = [(kind, row) for kind in kinds for row in kind.best.rows if row.engine_us and row.replayed_us]
    low, high = _limits([time for _, row in points for time in _times(row)])
    edges = [low, high]
    axes.fill_between(
        edges, [x * (1 - KERNEL_BOUND) for x in edges], [x * (1 + KERNEL_BOUND) for x in edges], color=BAND
    )
    axes.plot(edges, edges, color=GREY, linewidth=0.8)
    for kind, color in zip(kinds, KIND_COLORS, strict=False):
        rows = [row for one, row in points if one is kind]
        xs, ys = [_times(row)[0] for row in rows], [_times(row)[1] for row in rows]
        axes.scatter(xs, ys, s=[_area(row.share) for row in rows], color=color, alpha=0.8, linewidth=0.4, edgecolor="w")
        axes.scatter([], [], color=color, label=_state(kind))
    _name(axes, [row for _, row in points if row.judged and not row.within])
    if kinds:
        axes.legend(fontsize=6.5, loc="upper left", handletextpad=0.1, borderaxespad=0.1)
    axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges, aspect="equal")
    axes.set(xlabel="in the engine, µs an invocation", ylabel="replayed, µs an invocation")
    axes.set_title(f"Kernels (area: share of GPU time; band: ±{KERNEL_BOUND:.0%})", fontsize=9, loc="left")


def _state(kind: KindFidelity) -> str:
    """`decode, batch 16, full graphs: Program`."""
    return f"{', '.join(kind_label(kind).splitlines())}: {kind.best.state}"


def _times(row: ComparedCall) -> tuple[float, float]:
    return row.engine_us / row.count, row.replayed_us / row.count


def _limits(times: list[float]) -> tuple[float, float]:
    return (min(times) / 1.6, max(times) * 1.6) if times else (1.0, 10.0)


def _area(share: float) -> float:
    return SMALLEST + (LARGEST - SMALLEST) * share


def _name(axes: Any, outside: list[ComparedCall]) -> None:
    for row in sorted(outside, key=lambda row: -row.share)[:MOST_NAMED]:
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


KIND_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)  # Okabe and Ito's, safe for the color-blind


GREY, BAND = "#555555", "#E8E8E8"


def draw_totals(axes: Any, kinds: list[KindFidelity]) -> None:
    """Of each kind of step: kernels' durations, each state, and the Program back to back, over the engine's own."""
    axes.axvspan(100 * (1 - TOTAL_BOUND), 100 * (1 + TOTAL_BOUND), color=BAND, linewidth=0, zorder=0)
    axes.axvline(100, color=GREY, linewidth=0.8, zorder=3)
    bars = [(4 * place + number, bar) for place, kind in enumerate(kinds) for number, bar in enumerate(_bars(kind))]
    longest = max((bar.percent + bar.missing for _, bar in bars), default=100.0)
    end = max(longest, 100 * (1 + TOTAL_BOUND)) + 2
    for y, bar in bars:
        shade = _lighter(KIND_COLORS[y // 4], 0.35 * (y % 4))
        axes.barh(y, bar.percent, height=0.82, color=shade, linewidth=0, zorder=2)
        empty = {"facecolor": "white", "edgecolor": shade, "hatch": "//////", "linewidth": 0}
        axes.barh(y, bar.missing, left=bar.percent, height=0.82, zorder=2, **empty)
        axes.text(2, y, bar.text, va="center", fontsize=7, color="black" if y % 4 else "white")
        axes.text(end, y, f"{bar.percent:.1f}%", va="center", fontsize=7)
    axes.set_yticks([4 * place + 1 for place in range(len(kinds))], [kind_label(kind) for kind in kinds])
    axes.set(xlim=(0, end + 9), xlabel="replayed over the engine's, %")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Totals of a step (hatched: missing; band: ±{TOTAL_BOUND:.0%})", fontsize=9, loc="left")


@dataclass(frozen=True)
class Bar:
    """`percent`: replayed over the engine's; `missing`: of the engine's."""

    text: str
    percent: float
    missing: float = 0.0

    @classmethod
    def of(cls, name: str, replayed_us: float, engine_us: float, missing_us: float = 0.0) -> Bar:
        part = 100 / engine_us if engine_us else 0.0
        return cls(f"{name}: {duration(replayed_us)} for {duration(engine_us)}", part * replayed_us, part * missing_us)


def _bars(kind: KindFidelity) -> Iterator[Bar]:
    for state in (kind.serving, kind.in_program):
        yield Bar.of(f"kernels, {state.state}", state.replayed_us, state.engine_us, state.missing_us)
    if kind.span is not None and kind.program.us is not None:
        yield Bar.of("span, Program", kind.program.us, kind.span.own_us)


def _lighter(color: str, part: float) -> tuple[float, ...]:
    """`color` (#RRGGBB) with `part` of white."""
    channels = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(one + (1 - one) * part for one in channels)


def kind_label(kind: KindFidelity) -> str:
    """What tells kinds of steps apart, in three lines."""
    one = kind.kind
    size = f"batch {one.sequences:,}" if one.phase == "decode" else f"{one.tokens:,} tokens"
    return f"{one.phase}\n{size}\n{one.mode if one.mode == 'eager' else f'{one.mode} graphs'}"

"""The figure of `kcap replay --compare-engine`: every kernel replayed over the engine's, and totals by kind of step.

It needs matplotlib, as no other part of kcap does, and no display.
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

FIGURE_SIZE, FIGURE_DPI = (11.0, 4.8), 200  # inches
LARGEST, SMALLEST = 420.0, 9.0  # areas of the dots in points², for a share of 1 and of nearly nothing
MAX_NAMED = 6  # of the kernels outside the band
FIGURE_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def require_matplotlib() -> ModuleType:
    """matplotlib, or CallError with how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise CallError("figures need matplotlib: pip install kcap[plots]") from None
    return matplotlib


def draw_figure(fidelity: Fidelity, path: Path, heading: str = "") -> None:
    """Write the figure of `found` to `path`, a PNG; CallError where matplotlib is missing."""
    require_matplotlib().use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(FIGURE_STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=FIGURE_SIZE, width_ratios=(1.0, 1.15), layout="constrained")
        fill_figure(figure, axes, fidelity, heading)
        figure.savefig(path, dpi=FIGURE_DPI, format="png", metadata={"Software": None})
        pyplot.close(figure)


def fill_figure(figure: Any, axes: Any, fidelity: Fidelity, heading: str) -> None:
    """Kernels on the left of the two `axes`, totals on the right; below them, the kinds that lack a colour."""
    shown, rest = fidelity.kinds[: len(KIND_COLORS)], fidelity.kinds[len(KIND_COLORS) :]
    draw_kernels(axes[0], shown)
    draw_totals(axes[1], shown)
    if heading:
        figure.suptitle(heading, fontsize=10)
    if rest:
        share = share_of(sum(kind.steps * kind.serving.engine_us for kind in rest), fidelity.engine_us())
        kinds = f"{len(rest)} more kind{'' if len(rest) == 1 else 's'} of steps"
        figure.supxlabel(f"not shown: {kinds}, {share:.1%} of the GPU time", fontsize=8, color=GREY)


def draw_kernels(axes: Any, kinds: list[KindFidelity]) -> None:
    """One invocation of each Call: engine across, replay up, both logarithmic, and the allowed band.

    Each kind in the state that counts in the totals, which the legend names.
    """
    points = [(kind, row) for kind in kinds for row in kind.best.rows if row.engine_us and row.replayed_us]
    low, high = _limits([time for _, row in points for time in _times(row)])
    edges = [low, high]
    axes.fill_between(
        edges, [x * (1 - KERNEL_BOUND) for x in edges], [x * (1 + KERNEL_BOUND) for x in edges], color=BAND
    )
    axes.plot(edges, edges, color=GREY, linewidth=0.8)
    for kind, color in zip(kinds, KIND_COLORS, strict=False):
        rows = [row for kind_of_row, row in points if kind_of_row is kind]
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


def _name(axes: Any, rows: list[ComparedCall]) -> None:
    for row in sorted(rows, key=lambda row: -row.share)[:MAX_NAMED]:
        above = (row.ratio or 0) > 1
        offset, side = ((-6, 4), "right") if above else ((6, -4), "left")
        axes.annotate(
            row.call.operator,
            _times(row),
            offset,
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
    bars = [
        (4 * position + number, bar) for position, kind in enumerate(kinds) for number, bar in enumerate(_bars(kind))
    ]
    longest = max((bar.percent + bar.missing for _, bar in bars), default=100.0)
    end = max(longest, 100 * (1 + TOTAL_BOUND)) + 2
    for y, bar in bars:
        shade = _lighter(KIND_COLORS[y // 4], 0.35 * (y % 4))
        axes.barh(y, bar.percent, height=0.82, color=shade, linewidth=0, zorder=2)
        empty = {"facecolor": "white", "edgecolor": shade, "hatch": "//////", "linewidth": 0}
        axes.barh(y, bar.missing, left=bar.percent, height=0.82, zorder=2, **empty)
        axes.text(2, y, bar.text, va="center", fontsize=7, color="black" if y % 4 else "white")
        axes.text(end, y, f"{bar.percent:.1f}%", va="center", fontsize=7)
    axes.set_yticks([4 * position + 1 for position in range(len(kinds))], [kind_label(kind) for kind in kinds])
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
    channels = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return tuple(channel + (1 - channel) * part for channel in channels)


def kind_label(kind: KindFidelity) -> str:
    """The label of a kind of step, in three lines."""
    step_kind = kind.kind
    size = f"batch {step_kind.sequences:,}" if step_kind.phase == "decode" else f"{step_kind.tokens:,} tokens"
    return f"{step_kind.phase}\n{size}\n{step_kind.mode if step_kind.mode == 'eager' else f'{step_kind.mode} graphs'}"

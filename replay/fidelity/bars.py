"""The right half of the figure: the totals of each kind of step, as bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kcap.replay.fidelity.compare import TOTAL
from kcap.replay.fidelity.verdict import KindFidelity
from kcap.replay.report import duration

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's, safe for the color-blind
GREY, BAND = "#555555", "#E8E8E8"


def totals(axes: Any, kinds: list[KindFidelity]) -> None:
    """Of each kind of step: kernels' durations, each state, and the Program back to back, over the engine's own."""
    axes.axvspan(100 * (1 - TOTAL), 100 * (1 + TOTAL), color=BAND, linewidth=0, zorder=0)
    axes.axvline(100, color=GREY, linewidth=0.8, zorder=3)
    bars = [(4 * place + number, bar) for place, kind in enumerate(kinds) for number, bar in enumerate(_bars(kind))]
    longest = max((bar.percent + bar.missing for _, bar in bars), default=100.0)
    end = max(longest, 100 * (1 + TOTAL)) + 2
    for y, bar in bars:
        shade = _lighter(COLORS[y // 4], 0.35 * (y % 4))
        axes.barh(y, bar.percent, height=0.82, color=shade, linewidth=0, zorder=2)
        empty = {"facecolor": "white", "edgecolor": shade, "hatch": "//////", "linewidth": 0}
        axes.barh(y, bar.missing, left=bar.percent, height=0.82, zorder=2, **empty)
        axes.text(2, y, bar.text, va="center", fontsize=7, color="black" if y % 4 else "white")
        axes.text(end, y, f"{bar.percent:.1f}%", va="center", fontsize=7)
    axes.set_yticks([4 * place + 1 for place in range(len(kinds))], [label(kind) for kind in kinds])
    axes.set(xlim=(0, end + 9), xlabel="replayed over the engine's, %")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Totals of a step (hatched: missing; band: ±{TOTAL:.0%})", fontsize=9, loc="left")


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


def label(kind: KindFidelity) -> str:
    """What tells kinds of steps apart, in three lines."""
    one = kind.kind
    size = f"batch {one.sequences:,}" if one.phase == "decode" else f"{one.tokens:,} tokens"
    return f"{one.phase}\n{size}\n{one.mode if one.mode == 'eager' else f'{one.mode} graphs'}"

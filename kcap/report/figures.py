"""The figures of a report for papers: each as SVG and PNG, by matplotlib, from the same document as the page.

They need matplotlib and no display. What replay drew of its fidelity is copied beside them.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kcap.replay.calls.report import duration
from kcap.replay.fidelity.figure import FIGURE_STYLE, GREY, KIND_COLORS, require_matplotlib
from kcap.report.calls import CallColumns
from kcap.report.document import Report
from kcap.report.steps import Strip
from kcap.schemas.validation.report import printable

WIDTH = 7.0  # inches, two columns of a paper
DPI = 200
STYLE = {
    **FIGURE_STYLE,
    "text.parse_math": False,
    "svg.hashsalt": "kcap",
}  # names are no formulas; files are repeatable
REST_COLOR = "#9A9A9A"
LEAST_LABEL = 0.07  # of a bar: narrower segments have no name
LEAST_DISC = 0.001  # of the time
LARGEST_DISC = 900.0  # points² for all of the time
MOST_LABELS = 7
LABEL_SIZE = (170, 14)  # pixels
LONGEST_NAME = 28
FIDELITY = "fidelity.png"


def draw_figures(report: Report, folder: Path, fidelity: Path | None = None) -> list[Path]:
    """Draw what the report has data for into `folder`; the files. CallError where matplotlib is missing.

    `fidelity`: the output of `kcap replay --compare-engine`, whose figure is copied.
    """
    require_matplotlib().use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in figures_of(report).items():
        with pyplot.rc_context(STYLE):
            figure = draw(report, pyplot)
            for suffix, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
                files.append(folder / f"{name}.{suffix}")
                figure.savefig(files[-1], dpi=DPI, metadata=metadata)
            pyplot.close(figure)
    if fidelity is not None and (fidelity / FIDELITY).is_file():
        files.append(folder / FIDELITY)
        shutil.copyfile(fidelity / FIDELITY, files[-1])
    return files


def figures_of(report: Report) -> dict[str, Callable[[Report, Any], Any]]:
    """The figures that the report has data for, by their files' names."""
    found: dict[str, Callable[[Report, Any], Any]] = {}
    if report.calls.id:
        found["phases"] = draw_phases
    if report.mix_measured and report.rates is not None and next(discs(report), None):
        found["roofline"] = draw_roofline
    if report.histograms:
        found["batches"] = draw_histograms
    if report.strips:
        found["step"] = draw_step
    if report.against is not None and report.against.get("phases"):
        found["against"] = draw_against
    return found


def family_times(calls: CallColumns) -> dict[str, dict[str, float]]:
    """Of each phase its families' times (or invocations, where the report has no times)."""
    times: dict[str, dict[str, float]] = {}
    for phase, columns in calls.phases.items():
        sums: dict[str, float] = defaultdict(float)
        for kernel, us in zip(calls.kernel, columns.us, strict=True):
            sums[calls.kernels[kernel].family] += us or 0.0
        if any(sums.values()):
            times[phase] = dict(sums)
    return times


def family_colors(calls: CallColumns) -> Mapping[str, str]:
    """The largest families have a colour each; all others are grey."""
    totals: dict[str, float] = defaultdict(float)
    for of_phase in family_times(calls).values():
        for family, us in of_phase.items():
            totals[family] += us
    largest = sorted(totals, key=lambda family: -totals[family])[: len(KIND_COLORS)]
    return defaultdict(lambda: REST_COLOR, zip(largest, KIND_COLORS, strict=False))


def draw_phases(report: Report, pyplot: Any) -> Any:
    """A bar for each phase, as wide as the whole, cut into families."""
    times, colors = family_times(report.calls), family_colors(report.calls)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.7 + 0.55 * len(times)), layout="constrained")
    for row, of_phase in enumerate(times.values()):
        left, total = 0.0, sum(of_phase.values())
        for family, us in sorted(of_phase.items(), key=lambda item: -item[1]):
            share = us / total
            axes.barh(row, share, left=left, color=colors[family], edgecolor="white", linewidth=0.5)
            if share > max(LEAST_LABEL, 0.011 * len(family)):
                axes.text(
                    left + share / 2, row, f"{printable(family)}\n{share:.0%}", ha="center", va="center", fontsize=7
                )
            left += share
    of = {
        phase: duration(sum(t.values())) if report.mix_unit == "us" else f"{sum(t.values()):,.0f}"
        for phase, t in times.items()
    }
    axes.set_yticks(range(len(times)), [f"{phase}\n{of[phase]}" for phase in times])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel=f"share of the phase's {'GPU time' if report.mix_unit == 'us' else 'invocations'}")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return figure


Disc: TypeAlias = tuple[str, str, str, float, float, float]


def discs(report: Report) -> Iterator[Disc]:
    """Name, family, phase, share of all time, FLOPs for each byte, TFLOP/s of each kernel whose work is known."""
    calls = report.calls
    total = sum(us or 0.0 for columns in calls.phases.values() for us in columns.us) or 1.0
    for phase, columns in calls.phases.items():
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for place, kernel in enumerate(calls.kernel):
            us, count = columns.us[place], columns.count[place]
            if us is not None and calls.moved[place]:
                work = (us, count * calls.moved[place], count * calls.flops[place])
                sums[kernel] = [a + b for a, b in zip(sums[kernel], work, strict=True)]
        for kernel, (us, moved, flops) in sums.items():
            if flops and us / total >= LEAST_DISC:
                named = calls.kernels[kernel]
                yield named.name, named.family, phase, us / total, flops / moved, flops / us / 1e6


def draw_roofline(report: Report, pyplot: Any) -> Any:
    """Intensity against throughput, a disc for each kernel and phase."""
    assert report.rates is not None
    colors, rates = family_colors(report.calls), report.rates
    shown = sorted(discs(report), key=lambda disc: -disc[3])
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    ridge = rates.tflop_s * 1e3 / rates.memory_gb_s
    low = min(ridge, *(disc[4] for disc in shown)) / 3
    high = max(ridge, *(disc[4] for disc in shown)) * 3
    axes.plot(
        [low, ridge, high], [low * rates.memory_gb_s / 1e3, rates.tflop_s, rates.tflop_s], color="black", linewidth=1
    )
    for _, family, _, share, intensity, achieved in shown:
        axes.scatter(intensity, achieved, s=LARGEST_DISC * share + 6, color=colors[family], alpha=0.6, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte moved", ylabel="TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    _label_discs(axes, shown)
    axes.set_title(f"roof: {rates}", fontsize=8, loc="left")
    return figure


def _label_discs(axes: Any, shown: list[Disc]) -> None:
    """The names of the largest discs, but of those whose name would cover another's."""
    labelled: list[Any] = []
    for name, _, phase, _, *place in shown:
        x, y = axes.transData.transform(place)
        if all(abs(x - other[0]) > LABEL_SIZE[0] or abs(y - other[1]) > LABEL_SIZE[1] for other in labelled):
            labelled.append((x, y))
            text = f"{_short(name)}, {phase}"
            right = axes.transAxes.inverted().transform((x, y))[0] > 0.6
            offset, side = ((-8, 5), "right") if right else ((8, 5), "left")
            axes.annotate(text, place, offset, textcoords="offset points", fontsize=7, color=GREY, ha=side)
        if len(labelled) == MOST_LABELS:
            break


def draw_histograms(report: Report, pyplot: Any) -> Any:
    """A row for each histogram, a column for each phase."""
    phases = sorted({phase for one in report.histograms for phase in one.values})
    size = (WIDTH, 1.9 * len(report.histograms))
    figure, grid = pyplot.subplots(
        len(report.histograms), len(phases), figsize=size, layout="constrained", squeeze=False
    )
    for row, histogram in zip(grid, report.histograms, strict=True):
        for axes, phase in zip(row, phases, strict=True):
            values = histogram.values.get(phase, [])
            axes.bar(range(len(values)), [count for _, count in values], color=KIND_COLORS[0])
            step = max(len(values) // 4, 1)
            axes.set_xticks(range(0, len(values), step), [f"{value:,}" for value, _ in values[::step]], fontsize=6)
            axes.set_title(f"{histogram.title}, {phase}", fontsize=7, loc="left")
    return figure


def draw_step(report: Report, pyplot: Any) -> Any:
    """The first strip: every kernel of a profiled step, to scale."""
    strip, colors = report.strips[0], family_colors(report.calls)
    family = dict(zip(report.calls.id, (report.calls.kernels[k].family for k in report.calls.kernel), strict=True))
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.4), layout="constrained")
    start = min(strip.start_us)
    for at, us, call in zip(strip.start_us, strip.us, strip.call, strict=True):
        axes.broken_barh([(at - start, us)], (0, 1), color=colors[family.get(call, "")], linewidth=0)
    axes.set(yticks=[], xlim=(0, strip.span_us), xlabel=_axis(strip))
    axes.spines["left"].set_visible(False)
    return figure


def _axis(strip: Strip) -> str:
    size = f"{strip.sequences:,} sequences, {strip.tokens:,} tokens, {strip.mode}"
    return f"µs of a {strip.phase} step ({size}); busy {strip.busy_us / strip.span_us:.0%}"


def draw_against(report: Report, pyplot: Any) -> Any:
    """Families of a step of both Recordings, beside each other, a row for each phase."""
    assert report.against is not None
    phases = report.against["phases"]
    figure, grid = pyplot.subplots(
        len(phases), 1, figsize=(WIDTH, 2.2 * len(phases)), layout="constrained", squeeze=False
    )
    for (axes,), phase in zip(grid, phases, strict=True):
        sides, unit = _families_of_step(phase)
        names = sorted(
            sides["a"].keys() | sides["b"].keys(), key=lambda name: -max(side.get(name, 0.0) for side in sides.values())
        )
        for letter, color, offset in (("a", KIND_COLORS[0], -0.2), ("b", KIND_COLORS[1], 0.2)):
            heights = [sides[letter].get(name, 0.0) for name in names]
            places = [place + offset for place in range(len(names))]
            axes.bar(places, heights, width=0.38, color=color, label=_short(report.against[letter]))
        axes.set_xticks(range(len(names)), [_short(name) for name in names], fontsize=6, rotation=30, ha="right")
        axes.set(ylabel=unit)
        axes.set_title(f"a {phase['phase']} step", fontsize=8, loc="left")
        axes.legend(fontsize=7)
    return figure


def _families_of_step(phase: Mapping[str, Any]) -> tuple[dict[str, dict[str, float]], str]:
    timed = all(phase[letter]["us_per_step"] is not None for letter in "ab")
    sides: dict[str, dict[str, float]] = {letter: defaultdict(float) for letter in "ab"}
    for line in phase["lines"]:
        for letter in "ab":
            if (side := line[letter]) is not None:
                sides[letter][line["purpose"] or "of no family"] += (
                    (side["us_per_step"] or 0.0) if timed else side["per_step"]
                )
    for letter in "ab" if timed else "":
        for family, us in phase[letter]["us_within"].items():
            sides[letter][family] += us
    return sides, "µs" if timed else "invocations"


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"

"""A Recording's coverage in numbers and in words."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from kcap.capture.fold.coverage.attribute import Attributed
from kcap.schemas.recording.recording import Step
from kcap.schemas.results.coverage import CoverageSummary, Disagreement, Share, StepCoverage, Unexplained
from kcap.show.kernel_name import shorten

MOST_UNEXPLAINED = 20
PRINTED = 10
MODES = ("eager", "piecewise", "full")
KIND = {"rank", "phase", "tokens", "sequences", "lengths", "queries", "mode", "padded", "program"}


def covered(attributed: Attributed, step: Step, sm_mhz: int | None = None) -> StepCoverage:
    """A line of coverage.jsonl: `step` says what kind of step it was."""
    kernels = attributed.kernels
    return StepCoverage(
        **step.model_dump(include=KIND),
        index=attributed.index,
        sm_mhz=sm_mhz,
        gpu_us=_sum(kernel.us for kernel in kernels),
        explained_us=_sum(kernel.us for kernel in kernels if kernel.call is not None),
        kernels=kernels,
        disagreements=attributed.disagreements,
    )


def summarize(steps: Iterable[StepCoverage]) -> CoverageSummary:
    """What recording.json says of these steps."""
    steps = list(steps)
    modes = {mode: [step for step in steps if step.mode == mode] for mode in MODES}
    return CoverageSummary(
        **_share(steps).model_dump(),
        by_mode={mode: _share(of_mode) for mode, of_mode in modes.items() if of_mode},
        unexplained=_unexplained(steps)[:MOST_UNEXPLAINED],
        disagreements=_disagreements(steps)[:MOST_UNEXPLAINED],
        disagreeing_steps=sum(bool(step.disagreements) for step in steps),
    )


def _share(steps: list[StepCoverage]) -> Share:
    gpu, explained = _sum(step.gpu_us for step in steps), _sum(step.explained_us for step in steps)
    kernels = sum(len(step.kernels) for step in steps)
    share = explained / gpu if gpu else None
    return Share(steps=len(steps), kernels=kernels, gpu_us=gpu, explained_us=explained, share=share)


def _sum(times: Iterable[float]) -> float:
    return round(math.fsum(times), 3)


def _unexplained(steps: list[StepCoverage]) -> list[Unexplained]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        for kernel in step.kernels:
            if kernel.call is None:
                times[kernel.name, kernel.reason or ""].append(kernel.us)
    unexplained = [
        Unexplained(name=name, reason=reason, count=len(each), us=_sum(each)) for (name, reason), each in times.items()
    ]
    return sorted(unexplained, key=lambda item: (-item.us, item.name, item.reason))


def _disagreements(steps: list[StepCoverage]) -> list[Disagreement]:
    profiled, recorded, difference = Counter[str](), Counter[str](), Counter[str]()
    for disagreement in (disagreement for step in steps for disagreement in step.disagreements):
        profiled[disagreement.operator] += disagreement.profiled
        recorded[disagreement.operator] += disagreement.recorded
        difference[disagreement.operator] += abs(disagreement.profiled - disagreement.recorded)
    return [
        Disagreement(operator=name, profiled=profiled[name], recorded=recorded[name])
        for name, _ in sorted(difference.items(), key=lambda item: (-item[1], item[0]))
    ]


def coverage_lines(summary: CoverageSummary) -> list[str]:
    """What `kcap record --check-coverage` prints at its end."""
    return [_headline(summary), *_unexplained_table(summary), *_disagreement_lines(summary)]


def _headline(summary: CoverageSummary) -> str:
    steps = f"{summary.steps:,} step{'' if summary.steps == 1 else 's'}"
    if summary.share is None:
        return f"coverage: the profiler saw no GPU time in {steps}"
    modes = [f"{mode} {_percent(each.share)}" for mode, each in summary.by_mode.items() if each.share is not None]
    share = f"{_percent(summary.share)} of {_time(summary.gpu_us)} GPU time in {steps} is of recorded calls"
    return f"coverage: {share} ({', '.join(modes)})"


def _unexplained_table(summary: CoverageSummary) -> Iterator[str]:
    if not summary.unexplained:
        return
    yield "not of recorded calls:"
    for item in summary.unexplained[:PRINTED]:
        share = _percent(item.us / summary.gpu_us if summary.gpu_us else 0.0)
        numbers = f"{_time(item.us):>10}  {share:>7}  {item.count:>6,}×"
        yield f"{numbers}  {shorten(item.name)}: {item.reason}"
    if len(summary.unexplained) > PRINTED:
        yield "  … the rest is in coverage.jsonl"


def _disagreement_lines(summary: CoverageSummary) -> Iterator[str]:
    if not summary.disagreeing_steps:
        return
    yield f"in {summary.disagreeing_steps:,} of these steps the profiler and the recorder count differently:"
    for item in summary.disagreements[:PRINTED]:
        yield f"  {item.operator}: profiled {item.profiled:,}, recorded {item.recorded:,}"


def _percent(share: float | None) -> str:
    """Rounded down, so that 100.0 % is all of it."""
    return f"{math.floor((share or 0.0) * 1000 + 1e-9) / 10:.1f} %"


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:,.1f} ms"

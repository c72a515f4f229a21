"""The steps of a report: how large batches were, how long contexts, and a profiled step of each kind by its kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcap.report.calls import DIGITS, Interned
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Metadata
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import StepCoverage
from kcap.show.kernel_name import shorten

MOST_STRIPS = 12


@dataclass(frozen=True)
class Histogram:
    """`values` by phase: each value that there was with the number of times. `of`: what was counted, in words."""

    title: str
    unit: str
    of: str
    values: dict[str, list[tuple[int, int]]]


def histograms(metadata: Metadata, recording: Recording | None) -> list[Histogram]:
    """Sequences and new tokens of a step, exact; and of the steps whose lines were kept the contexts of sequences."""
    sequences, tokens = _batch_sizes(metadata)
    every = "every counted step"
    found = [
        Histogram("Sequences in a step", "sequences", every, sequences),
        Histogram("New tokens in a step", "tokens", every, tokens),
    ]
    lengths: dict[str, Counter[int]] = defaultdict(Counter)
    steps = recording.steps if recording is not None else []
    for step in steps:
        lengths[step.phase].update(step.lengths)
    kept = f"sequences of the {len(steps):,} steps whose lines were kept"
    found.append(Histogram("Context of a sequence", "tokens", kept, _sorted(lengths)))
    return [histogram for histogram in found if histogram.values]


def _batch_sizes(metadata: Metadata) -> tuple[dict[str, list[tuple[int, int]]], dict[str, list[tuple[int, int]]]]:
    sequences: dict[str, Counter[int]] = defaultdict(Counter)
    tokens: dict[str, Counter[int]] = defaultdict(Counter)
    for batch in metadata.batches:
        for counts, name in ((sequences, "sequences"), (tokens, "tokens")):
            counts[str(batch.get("phase"))][int(batch.get(name) or 0)] += int(batch.get("steps") or 0)
    return _sorted(sequences), _sorted(tokens)


def _sorted(counts: Mapping[str, Counter[int]]) -> dict[str, list[tuple[int, int]]]:
    return {phase: sorted(counts[phase].items()) for phase in PHASES if counts.get(phase)}


@dataclass(frozen=True)
class Strip:
    """One profiled step, the one of the middle GPU time among the `steps` of its kind, with a list entry a kernel.

    Microseconds; `start_us` from the start of the first kernel. `call`: the id, -1 where no Call launched it. `name`: a
    place in `names`. `span_us` is from the first kernel's start to the last one's end, `busy_us` that with any kernel.
    """

    phase: str
    mode: str
    padded: int | None
    tokens: int
    sequences: int
    steps: int
    span_us: float
    busy_us: float
    gpu_us: float
    names: list[str]
    name: list[int]
    start_us: list[float]
    us: list[float]
    call: list[int]


def strips(recording: Recording) -> list[Strip]:
    """A strip for each kind of profiled step, decode first; none where kernels have no start, or none were profiled."""
    if recording.metadata.coverage is None:
        return []
    kinds: dict[tuple[str, str, int | None, int], list[StepCoverage]] = defaultdict(list)
    for step in coverage.read(recording.path / coverage.FILE):
        if step.kernels and all(kernel.start_us is not None for kernel in step.kernels):
            kinds[step.phase, step.mode, step.padded, step.sequences].append(step)
    order = sorted(kinds, key=lambda kind: (kind[0] != "decode", -len(kinds[kind]), -kind[3]))
    return [_strip(kinds[kind]) for kind in order[:MOST_STRIPS]]


def _strip(steps: Sequence[StepCoverage]) -> Strip:
    step = sorted(steps, key=lambda step: step.gpu_us)[len(steps) // 2]
    names = Interned()
    numbers = [names(shorten(kernel.name)) for kernel in step.kernels]
    times = [(kernel.start_us or 0.0, kernel.us) for kernel in step.kernels]
    return Strip(
        phase=step.phase,
        mode=step.mode,
        padded=step.padded,
        tokens=step.tokens,
        sequences=step.sequences,
        steps=len(steps),
        span_us=round(max(start + us for start, us in times) - min(start for start, _ in times), DIGITS),
        busy_us=round(_covered(times), DIGITS),
        gpu_us=step.gpu_us,
        names=names.values,
        name=numbers,
        start_us=[start for start, _ in times],
        us=[us for _, us in times],
        call=[-1 if kernel.call is None else kernel.call for kernel in step.kernels],
    )


def _covered(times: Iterable[tuple[float, float]]) -> float:
    """Microseconds in which any of the kernels (start, length) ran: those that overlap count once."""
    total, end = 0.0, 0.0
    for start, us in sorted(times):
        total += max(start + us - max(start, end), 0.0)
        end = max(end, start + us)
    return total

"""On which Sample each Call of a Program runs: those of one step belong together, so that their lengths agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kcap.replay.program.choose import Chosen
from kcap.replay.source import Samples, by_call, needs_sample
from kcap.schemas.recording import Call, Recording, Sample


def choose_samples(recording: Recording, chosen: Chosen, calls: Iterable[Call]) -> dict[int, int | None]:
    """By Call that needs one: a line of samples.jsonl, from 0; None where there is none.

    Of the Program's phase, and of the step asked for, or of that step of the Program's which has most Samples; where a
    Call was not sampled in it, of the nearest step.
    """
    samples = by_call(recording.samples)
    needing = [call for call in calls if needs_sample(call)]
    step = common_step(recording, chosen, samples, needing)
    return {call.id: nearest(samples.get(call.id, []), chosen.kind.phase, step) for call in needing}


def common_step(recording: Recording, chosen: Chosen, samples: Samples, calls: Iterable[Call]) -> int | None:
    """The step that was asked for, else the one of the Program in which most of `calls` were sampled."""
    if chosen.step is not None:
        return chosen.step.index
    phase = chosen.kind.phase
    own = {step.index for step in recording.steps if (step.program, step.phase) == (chosen.program.id, phase)}
    seen = {
        (call.id, sample.step)
        for call in calls
        for _, sample in samples.get(call.id, [])
        if sample.phase == phase and sample.step is not None
    }
    counted = Counter(step for _, step in seen)
    return max(counted, key=lambda step: (step in own, counted[step], -(step or 0)), default=None)


def nearest(samples: Iterable[tuple[int, Sample]], phase: str, step: int | None) -> int | None:
    """The line of the Sample of this phase, if there is one, that is nearest to `step`."""

    def distance(item: tuple[int, Sample]) -> tuple[bool, bool, int, int]:
        line, sample = item
        off = 0 if step is None or sample.step is None else abs(sample.step - step)
        return sample.phase != phase, sample.step is None and step is not None, off, line

    found = min(samples, key=distance, default=None)
    return None if found is None else found[0]

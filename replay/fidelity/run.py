"""Replay what the profiled steps of a Recording ran, and hold it against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kcap.replay.fidelity.compare import Replayed, compare
from kcap.replay.fidelity.engine import KindSteps
from kcap.replay.fidelity.how import How
from kcap.replay.fidelity.nearest import Nearest, Steps, by_place, nearest
from kcap.replay.fidelity.verdict import PROGRAM, SERVING, Fidelity, KindFidelity, ProgramTime
from kcap.replay.source import Samples, by_call, needs_sample
from kcap.schemas.measurement import Measurement
from kcap.schemas.program_measurement import ProgramCall, ProgramMeasurement
from kcap.schemas.recording import Call, Recording

NO_DURATIONS = "the profiler saw no kernel of its replay"
ON_HOST = "its replay used no GPU"
NO_PROGRAM = "its steps name no Program"
Chosen = Mapping[int, Nearest]  # the Sample for each Call, by id


class Replayer(Protocol):
    """What replays; kcap.replay.fidelity.replaying has the one that does it on a GPU."""

    def call(self, call: Call, chosen: Nearest, kind: KindSteps) -> Measurement:
        """One Call alone, in the `serving` state, with its kernels' durations."""

    def program(self, number: int, chosen: Chosen, kind: KindSteps) -> ProgramMeasurement:
        """A Program as a whole, with its kernels' durations."""


@dataclass
class Ran:
    """What was held against each other, and the measurements that it rests on."""

    fidelity: Fidelity
    measurements: list[Measurement] = field(default_factory=list)
    programs: list[ProgramMeasurement] = field(default_factory=list)


def run(
    recording: Recording, kinds: list[KindSteps], replayer: Replayer, tell: Callable[[str], None] = lambda name: None
) -> Ran:
    """Replay every Call and Program of `kinds`; `tell` hears of each before it is replayed."""
    samples, steps = by_call(recording.samples), by_place(recording.steps)
    ran = Ran(Fidelity([]))
    for kind in kinds:
        chosen = {number: choose(recording.calls[number], kind, samples, steps) for number in kind.invocations}
        alone = {}
        for number, sample in chosen.items():
            tell(recording.calls[number].operator)
            ran.measurements.append(measurement := replayer.call(recording.calls[number], sample, kind))
            alone[number] = of_measurement(measurement, sample)
        tell(f"Program of {kind.kind.phase}")
        whole = None if kind.program is None else replayer.program(kind.program, chosen, kind)
        ran.programs += [whole] if whole else []
        ran.fidelity.kinds.append(held(recording, kind, alone, whole))
    return ran


def held(
    recording: Recording, kind: KindSteps, alone: Mapping[int, Replayed], whole: ProgramMeasurement | None
) -> KindFidelity:
    calls = {call.id: call for call in recording.calls}
    inside = {call.call: of_program_call(call) for call in whole.calls} if whole else {}
    serving, in_program = compare(kind, calls, alone, SERVING), compare(kind, calls, inside, PROGRAM)
    return KindFidelity.of(kind, serving, in_program, of_program(whole))


def choose(call: Call, kind: KindSteps, samples: Samples, steps: Steps) -> Nearest:
    return nearest(samples.get(call.id, []), kind.kind, kind.steps, steps) if needs_sample(call) else Nearest()


def of_measurement(measurement: Measurement, chosen: Nearest) -> Replayed:
    """Kernel durations and nothing else: another clock's time is no answer."""
    names, how = frozenset(kernel.name for kernel in measurement.kernels), How.of(measurement)
    if measurement.status != "ok":
        return Replayed(reason=f"{measurement.status}: {measurement.reason}", sample=chosen.index, how=how)
    us = 0.0 if measurement.method == "none" else measurement.kernel_us
    reason = "" if us is not None else ON_HOST if measurement.method == "host" else NO_DURATIONS
    return Replayed(us, reason, names, chosen.index, chosen.context, how)


def of_program_call(call: ProgramCall) -> Replayed:
    if call.status in ("skipped", "failed"):
        return Replayed(reason=f"{call.status}: {call.reason}", sample=call.sample)
    names = frozenset(kernel.name for kernel in call.kernels)
    if call.status == "host":
        return Replayed(reason=ON_HOST, sample=call.sample)
    return Replayed(call.us, "" if call.us is not None else NO_DURATIONS, names, call.sample)


def of_program(whole: ProgramMeasurement | None) -> ProgramTime:
    if whole is None:
        return ProgramTime(reason=NO_PROGRAM)
    if whole.status != "ok" or whole.median_us is None:
        return ProgramTime(None, whole.reason or whole.status, whole.program, how=How.of(whole))
    known = whole.program, whole.invocations, whole.left_out, whole.unmatched_us or 0.0, whole.stretches
    return ProgramTime(whole.median_us, "", *known, How.of(whole), whole.clocks.sm_mhz if whole.clocks else None)

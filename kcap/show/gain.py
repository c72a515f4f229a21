"""What could be gained: the engine's time of each kernel over its floor, weighed by its share of every phase.

The most that any kernel could save of a phase, in the place of the engine's, is

    share of the phase's GPU time * (1 - floor / time)

where the floor is what the device cannot go below for the bytes and FLOPs of the calls. A kernel without a known floor
saves nothing here, and its time is told. No kernel is shorter than one that does next to nothing: the kernel of one
element that `kcap replay` times, or the shortest of the profiled steps. What fusing kernels would save is not said.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kcap.errors import CallError
from kcap.schemas.recording.phases import ALL_PHASES, PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Count
from kcap.schemas.recording.seam import Seam, seam_of
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results import coverage
from kcap.schemas.results.measurement import Measurement, mean_us, on_the_device
from kcap.show.estimate import Rates, bytes_and_flops

if TYPE_CHECKING:
    from kcap.schemas.derive.derive import Derived


@dataclass(frozen=True)
class CallTime:
    """Microseconds of one invocation: `us` by phase, and what the device cannot go below; None where not known.

    `moved`: bytes that it reads and writes at least, `flops` that it computes; 0 where not known.
    """

    us: Mapping[str, float]
    floor_us: float | None
    moved: int = 0
    flops: int = 0

    def of_count(self, count: Count) -> tuple[float, float] | None:
        """Microseconds of so many invocations, and of them at the floor, at most the same; None without a time."""
        us = self.us.get(count.phase)
        if us is None:
            return None
        return count.count * us, count.count * (us if self.floor_us is None else min(self.floor_us, us))


NO_TIME = CallTime({}, None)


@dataclass
class Gain:
    """A Definition's kernels, or an operator's that has none. Microseconds of all invocations, by phase.

    `floor_us`: at the floor, at most what they take; `unknown_us`: of those whose floor is not known.
    `why_no_seam`: why none can be replaced though its operator could be.
    """

    name: str
    family: str | None
    has_definition: bool
    seams: set[Seam] = field(default_factory=set)
    why_no_seam: str = ""
    count: Counter[str] = field(default_factory=Counter)
    engine_us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    floor_us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown_us: float = 0.0

    @property
    def times_floor(self) -> float | None:
        """The engine's time over the floor, where all of it has one."""
        floor = self.floor_us[ALL_PHASES]
        return self.engine_us[ALL_PHASES] / floor if floor and not self.unknown_us else None

    def saved_us(self, phase: str) -> float:
        """At most."""
        return self.engine_us[phase] - self.floor_us[phase]


@dataclass(frozen=True)
class Gains:
    """`rows`: those first that could save most. `total_us`: of all kernels with a time, by phase; `steps`: by phase.

    `untimed`: invocations of kernels without a time. `source`: where the times and the floors are from.
    """

    rows: Sequence[Gain]
    total_us: Mapping[str, float]
    steps: Mapping[str, int]
    untimed: int
    source: str

    @property
    def phases(self) -> list[str]:
        return [phase for phase in (*PHASES, ALL_PHASES) if self.total_us.get(phase)]

    def share(self, row: Gain, phase: str) -> float:
        """Of the phase's GPU time."""
        return row.engine_us[phase] / self.total_us[phase]

    def most(self, row: Gain, phase: str) -> float:
        """The largest part of the phase's GPU time that could be saved; 0 where there is no seam."""
        return row.saved_us(phase) / self.total_us[phase] if row.seams else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "untimed": self.untimed,
            "steps": dict(self.steps),
            "total_us": dict(self.total_us),
            "rows": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Gain) -> dict[str, Any]:
        return {
            "name": row.name,
            "family": row.family,
            "definition": row.has_definition,
            "seams": sorted(row.seams),
            "why_no_seam": "" if row.seams else row.why_no_seam,
            "times_floor": row.times_floor,
            "unknown_us": row.unknown_us,
            "phases": {
                phase: {
                    "count": row.count[phase],
                    "engine_us": row.engine_us[phase],
                    "floor_us": row.floor_us[phase],
                    "share": self.share(row, phase),
                    "most": self.most(row, phase),
                    "most_us_a_step": row.saved_us(phase) / self.steps[phase]
                    if row.seams and self.steps.get(phase)
                    else None,
                }
                for phase in self.phases
                if row.count[phase]
            },
        }


def gains(recording: Recording, times: Mapping[int, CallTime], source: str, derived: Derived | None = None) -> Gains:
    """What could be gained of `recording`, whose Calls (by id) take `times`; `derived`: its Definitions, if known."""
    from kcap.schemas.derive.derive import derive  # needs torch

    derived = derived or derive(recording)
    groups, rows = gain_groups(derived), dict[str, Gain]()
    untimed = 0
    for call in recording.kernels():
        name, family, defined = groups.get(call.id, (call.operator, None, False))
        row = rows.setdefault(name, Gain(name, family, defined))
        if (seam := seam_of(call)) is not None and call.id not in derived.why_no_form:
            row.seams.add(seam)
        row.why_no_seam = derived.why_no_form.get(call.id, row.why_no_seam)
        time = times.get(call.id, NO_TIME)
        for count in call.counts:
            row.count.update({count.phase: count.count, ALL_PHASES: count.count})
            if (of_count := time.of_count(count)) is None:
                untimed += count.count
                continue
            row.unknown_us += of_count[0] if time.floor_us is None else 0.0
            for phase in (count.phase, ALL_PHASES):
                row.engine_us[phase] += of_count[0]
                row.floor_us[phase] += of_count[1]
    total = {phase: sum(row.engine_us[phase] for row in rows.values()) for phase in (*PHASES, ALL_PHASES)}
    steps = {phase: number for phase, number in recording.metadata.steps.items() if number}
    order = sorted(
        rows.values(), key=lambda row: (not row.seams, -row.saved_us(ALL_PHASES), -row.engine_us[ALL_PHASES], row.name)
    )
    return Gains(order, total, {**steps, ALL_PHASES: sum(steps.values())}, untimed, source)


def gain_groups(derived: Derived) -> dict[int, tuple[str, str | None, bool]]:
    """Of each Call (by id) the row of Gains that it is in: its Definition (of two that of the engine's arguments), or
    the family that it is a part of; that family; and whether it is the former."""
    of_families = {call: (family, family, False) for call, family in derived.family_of().items()}
    of_definitions = {
        use.call.id: (kernel.definition.name, kernel.family, True)
        for kernel in derived.definitions
        for use in kernel.uses
    }
    return {**of_families, **of_definitions}


def measured_times(recording: Recording, measurements: Iterable[Measurement]) -> dict[int, CallTime]:
    """Of `kcap replay`; CallError where they are of none of the Recording's Calls."""
    lines: dict[str, list[Measurement]] = defaultdict(list)
    for line in on_the_device(list(measurements)):
        lines[line.key].append(line)
    times = {
        call.id: _measured(call, of_call) for call in recording.kernels() if (of_call := lines.get(call_key(call)))
    }
    if not times:
        raise CallError(
            f"--measurements: of no call of {recording.path} "
            f"(kcap replay {shlex.quote(str(recording.path))} -o FILE measures them)"
        )
    return times


def _measured(call: Call, lines: Sequence[Measurement]) -> CallTime:
    us = {phase: mean_us(lines, phase) for phase in PHASES}
    floors = [max(line.roofline.us, line.floor_us or 0.0) for line in lines if line.roofline is not None]
    work = [line.work for line in lines if line.work is not None]
    return CallTime(
        {phase: of_phase for phase, of_phase in us.items() if of_phase is not None},
        fmean(floors) if floors else None,
        round(fmean(least.moved for least in work)) if work else 0,
        round(fmean(least.flops for least in work)) if work else 0,
    )


def profiled_times(recording: Recording, rates: Rates) -> dict[int, CallTime]:
    """Of the profiled steps: a Call's time in a step of its phase, shared out over as many invocations as a counted
    step has on average. Floors are by `rates`, and no shorter than the shortest kernel of these steps. Empty where no
    step was profiled.
    """
    if recording.metadata.coverage is None:
        return {}
    us: dict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    shortest = math.inf
    profiled: Counter[str] = Counter()
    for step in coverage.read(recording.path / coverage.FILE):
        profiled[step.phase] += 1
        for kernel in step.kernels:
            if kernel.call is not None:
                us[kernel.call][step.phase] += kernel.us
                shortest = min(shortest, kernel.us)
    steps = recording.metadata.steps
    times = {}
    for call in recording.kernels():
        a_step = {phase: call.counted(phase) / steps[phase] for phase in PHASES if steps.get(phase)}
        by_phase: dict[str, float] = {
            phase: us[call.id][phase] / profiled[phase] / number
            for phase, number in a_step.items()
            if number and profiled[phase] and call.id in us
        }
        if by_phase:
            work = bytes_and_flops(call, recording.sample_by_call.get(call.id), recording)
            floor = rates.least_us(*work)
            times[call.id] = CallTime(by_phase, max(floor, shortest) if floor else None, *work)
    return times

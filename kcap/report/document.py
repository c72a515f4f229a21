"""What a report shows, gathered from what `kcap show`, `gain`, `diff` and `bench` compute: the numbers are theirs.

The document goes into the page as JSON (`page.py`). The page computes no time and no count: it only adds them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kcap.report.agents import AgentTrace
from kcap.report.calls import CallColumns, CallDetails, call_columns, call_details, costliest_first
from kcap.report.judged import Judged
from kcap.report.steps import Histogram, Strip, histograms, strips
from kcap.schemas.recording.phases import PHASES
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Metadata, kernel_invocations, working_kernels
from kcap.show.estimate import Rates
from kcap.show.gain import CallTime, gain_groups
from kcap.show.recording import header, identity
from kcap.show.summary import Times, times_of
from kcap.version import __version__

if TYPE_CHECKING:  # this needs torch, without which there are no Definitions and no families
    from kcap.schemas.derive.derive import Derived

ESTIMATE = "times: an estimate, from the bytes that each call moves and the FLOPs that it computes, at {}"
NO_TIMES = "no times are known: invocations are shown in their place"
NO_TORCH = "Definitions and families are not known: they need PyTorch where the report is made"
SHOWN_REASONS = 12


@dataclass(frozen=True)
class Mix:
    """What the counted steps took, by `times` of one invocation of each Call (by id).

    `unit`: `us`, or `invocations` where no time is known. `source`: where times are from; `measured`: from a clock.
    """

    unit: str
    source: str
    measured: bool
    times: Mapping[int, CallTime] = field(default_factory=dict)

    @classmethod
    def of(cls, known: KnownTimes | None, times: Times, kernels: Sequence[Call]) -> Mix:
        """The times that are `known`, else an estimate, else none."""
        if known is not None:
            return cls("us", known[1], True, known[0])
        each = {call.id: times.estimated.get(call.id, 0.0) / max(call.total, 1) for call in kernels}
        unit, source = ("us", ESTIMATE.format(times.rates)) if times.estimated else ("invocations", NO_TIMES)
        of_call = {number: us if times.estimated else 1.0 for number, us in each.items()}
        return cls(unit, source, False, {n: CallTime(dict.fromkeys(PHASES, us), None) for n, us in of_call.items()})


KnownTimes = tuple[Mapping[int, CallTime], str]  # of `kcap gain`: by the Call's id, and where they are from


@dataclass(frozen=True)
class Words:
    """What no figure shows: a title, and a line for each thing that was dropped, is partial or is not known."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Extras:
    """What other commands found out: `agents` as `kcap show --by turn`, `against` as `kcap diff --json`, `applied` as
    `kcap ab`, `fidelity` as `kcap replay --compare-engine`."""

    agents: AgentTrace | None = None
    against: dict[str, Any] | None = None
    judged: Judged | None = None
    applied: dict[str, Any] | None = None
    fidelity: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """All that the page shows but details. `total`: invocations of kernels that do work, `distinct`: of how many Calls.

    `gpu_us` and `estimated_us`: those of `kcap show`, of all kernels. `coverage`: the share of the GPU time of the
    profiled steps that is of recorded Calls. `definitions`: of a dataset, as `kcap show --json` lists them.
    """

    kind: str
    source: str
    identity: str
    header: list[str]
    steps: dict[str, int]
    total: int
    distinct: int
    gpu_us: float
    estimated_us: float
    coverage: float | None
    mix_unit: str
    mix_source: str
    mix_measured: bool
    rates: Rates | None
    calls: CallColumns
    histograms: list[Histogram]
    strips: list[Strip]
    words: list[Words]
    agents: AgentTrace | None = None
    against: dict[str, Any] | None = None
    judged: Judged | None = None
    applied: dict[str, Any] | None = None
    fidelity: dict[str, Any] | None = None
    definitions: list[dict[str, Any]] = field(default_factory=list)
    kcap: str = __version__


@dataclass(frozen=True)
class Subject:
    """What is reported on: a Recording, or the Calls of a trace file. `derived`: None without torch."""

    kind: str
    source: str
    calls: list[Call]
    metadata: Metadata
    recording: Recording | None = None
    derived: Derived | None = None


def make_report(
    subject: Subject, known: KnownTimes | None, rates: Rates | None, extras: Extras
) -> tuple[Report, CallDetails]:
    """The report, and the details of its Calls. `rates`: of the recorded device; FormatError if files are damaged."""
    kernels = working_kernels(subject.calls)
    recording, metadata = subject.recording, subject.metadata
    times = times_of(recording, rates) if recording is not None else Times()
    mix = Mix.of(known, times, kernels)
    ordered = costliest_first(kernels, times, mix.times)
    groups = gain_groups(subject.derived) if subject.derived is not None else {}
    report = Report(
        kind=subject.kind,
        source=subject.source,
        identity=identity(metadata) if recording is not None else subject.source,
        header=[line.plain for line in header(metadata)] if recording is not None else [],
        steps={phase: metadata.steps[phase] for phase in PHASES if metadata.steps.get(phase)},
        total=kernel_invocations(kernels),
        distinct=sum(call.total > 0 for call in kernels),
        gpu_us=sum(times.measured.values()),
        estimated_us=sum(times.estimated.values()),
        coverage=(metadata.coverage or {}).get("share"),
        mix_unit=mix.unit,
        mix_source=mix.source,
        mix_measured=mix.measured,
        rates=rates,
        calls=call_columns(ordered, groups, times, mix.times),
        histograms=histograms(metadata, recording),
        strips=strips(recording) if recording is not None else [],
        words=list(_words(subject, mix, kernels)),
        agents=extras.agents,
        against=extras.against,
        judged=extras.judged,
        applied=extras.applied,
        fidelity=extras.fidelity,
    )
    return report, call_details(recording, ordered)


def _words(subject: Subject, mix: Mix, kernels: Sequence[Call]) -> Iterator[Words]:
    yield Words("Times", list(_of_times(subject, mix, kernels)))
    sections = {
        "Recording": _of_recording(subject.metadata),
        "GPU time of no recorded call": _unexplained(subject.metadata),
        "Definitions": _refused(subject),
        "Sources and Samples": _unread(subject, kernels),
    }
    for title, lines in sections.items():
        if found := list(lines):
            yield Words(title, found)


def _of_times(subject: Subject, mix: Mix, kernels: Sequence[Call]) -> Iterator[str]:
    yield mix.source
    untimed = sum(
        count.count
        for call in kernels
        for count in call.counts
        if call.id not in mix.times or count.phase not in mix.times[call.id].us
    )
    if untimed:
        yield f"{untimed:,} invocations have no time: they are in counts and in no share of time"
    if subject.recording is not None and subject.metadata.coverage is None:
        yield "no step was profiled (kcap record --check-coverage): what the GPU spent in each kernel is not known"


def _of_recording(metadata: Metadata) -> Iterator[str]:
    """What `kcap show` warns of, and taps that saw nothing."""
    lines = [line.plain for line in header(metadata)]
    yield from lines[_first_warning(metadata, lines) :]
    for (name, status, detail), n in Counter((tap.name, tap.status, tap.detail) for tap in metadata.taps).items():
        if status in ("off", "absent"):
            fate = "was switched off" if status == "off" else "had nothing to look into"
            yield f"tap {name} {fate}: {detail}{f' ({n} processes)' if n > 1 else ''}"


def _first_warning(metadata: Metadata, lines: Sequence[str]) -> int:
    """Where warnings begin in the header: without them it is as long as that of the same Recording without trouble."""
    sound = metadata.model_copy(update={"complete": True, "taps": [], "disagreements": [], "dropped": {}, "notes": []})
    return len(list(header(sound)))


def _unexplained(metadata: Metadata) -> Iterator[str]:
    unexplained = (metadata.coverage or {}).get("unexplained") or []
    for kernel in unexplained[:SHOWN_REASONS]:
        times = f"{kernel.get('us', 0):,.1f} µs, {kernel.get('count', 0):,} times"
        yield f"{kernel.get('name')}: {times}: {kernel.get('reason')}"
    if len(unexplained) > SHOWN_REASONS:
        yield f"{len(unexplained) - SHOWN_REASONS:,} more kernels: recording.json has all"


def _refused(subject: Subject) -> Iterator[str]:
    """Calls that no Definition can hold, by reason."""
    if subject.derived is None:
        yield NO_TORCH
        return
    totals = {call.id: call.total for call in subject.calls}
    reasons: Counter[str] = Counter()
    for number, reason in subject.derived.refused.items():
        reasons[reason] += totals.get(number, 0)
    for reason, count in reasons.most_common(SHOWN_REASONS):
        yield f"{count:,} invocations have no Definition: {reason}"
    if len(reasons) > SHOWN_REASONS:
        yield f"{len(reasons) - SHOWN_REASONS:,} more reasons"


def _unread(subject: Subject, kernels: Sequence[Call]) -> Iterator[str]:
    unread = Counter(call.launch.unread for call in kernels if call.launch is not None and call.launch.kernel is None)
    for reason, count in unread.items():
        yield f"{count:,} launched kernels have no source: {reason or 'it could not be read'}"
    if shared := sum(call.shapes > 1 for call in kernels):
        yield f"{shared:,} calls stand for several signatures of about their size, beyond the most that are kept apart"

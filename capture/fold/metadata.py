"""recording.json: what was recorded, by what ranks, in which windows, with which taps, and what of it was lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kcap.capture.fold.programs import Batch, Programs
from kcap.capture.session import Session
from kcap.capture.shards.counts import (
    CLOSED,
    FAILED,
    LOOSE_STEPS,
    OFF_STEP,
    OVERFLOW,
    SAMPLES_SKIPPED,
    SHARD_NAME,
    STEPS,
    TRACED,
)
from kcap.capture.shards.lines import CallLine, GroupLine, NoteLine, ProcessLine, TapLine, WindowLine
from kcap.capture.shards.reader import Shard
from kcap.schemas.recording.recording import PHASES, Call, Metadata, Tap
from kcap.schemas.recording.records import REPLICA, Rank, RecordedPlan, totals
from kcap.schemas.results.coverage import CoverageSummary
from kcap.system.redact import redact_arguments, redact_command
from kcap.version import __version__

NO_PROCESS = ProcessLine(t="process", pid=0, recorder="")
DROPPED = {"overflow": OVERFLOW, "samples": SAMPLES_SKIPPED, "off_step": OFF_STEP, "traced": TRACED}
RECORDERS = ("dispatcher", "dispatch_mode", "window")  # who fails when the recorder does


def _taps(shards: list[Shard]) -> list[Tap]:
    taps = []
    for shard in shards:
        name = SHARD_NAME.fullmatch(shard.stem.name)  # a process that did not come to record has no other number
        rank, pid = shard.rank, shard.pid or (int(name[2]) if name else 0)
        lines = shard.lines(TapLine)
        failures = [line for line in lines if line.name in RECORDERS and line.status == "failed"]
        taps += [Tap(name=line.name, rank=rank, pid=pid, status=line.status, detail=line.detail) for line in lines]
        if shard.header(FAILED) and not failures:
            detail = "it could write no more (disk full?)"
            taps.append(Tap(name="dispatcher", rank=rank, pid=pid, status="failed", detail=detail))
        if shard.process and not failures and not shard.header(FAILED):
            taps.append(Tap(name=shard.process.recorder, rank=rank, pid=pid))
    return taps


def make_metadata(
    session: Session, shards: list[Shard], programs: Programs, calls: list[Call], notes: list[str]
) -> Metadata:
    recording = [shard for shard in shards if shard.process]
    processes = [shard.process for shard in recording if shard.process]
    first = processes[0] if processes else NO_PROCESS
    ranks = ranks_of(recording, programs)
    counted = first_ranks(ranks)
    steps: Counter[str] = Counter()
    for rank in ranks:
        steps.update(rank.steps if rank.rank in counted else {})
    dropped = {name: sum(shard.header(header) for shard in recording) for name, header in DROPPED.items()}
    return Metadata(
        kernel_ids="definition",
        kcap=__version__,
        model=session.model or first.model,
        framework=first.framework or session.framework,  # a command need not name its engine
        framework_version=first.framework_version,
        engine_arguments=redact_arguments(session.engine_arguments),
        command=redact_command(session.command),
        client=redact_command(session.client),
        layers_recorded=first.layers,
        layers_model=session.layers_model or first.layers,
        plan=RecordedPlan.model_validate(session.plan) if session.plan else None,
        device=first.device,
        driver=first.driver,
        torch=first.torch,
        python=first.python,
        world_size=max((max(process.world_size, process.rank + 1) for process in processes), default=1),
        ranks=ranks,
        recorder=sorted({process.recorder for process in processes}),
        complete=bool(recording) and all(map(_is_whole, shards)),
        taps=_taps(shards),
        steps={name: times for name, times in sorted(steps.items()) if times},
        batches=_batches(programs, [batch for batch in programs.batches if batch.rank in counted]),
        totals=totals(calls),
        dropped={name: total for name, total in dropped.items() if total},
        windows=counted_windows(recording),
        notes=sorted({*_shard_notes(shards), *session_notes(session, shards), *notes}),
    )


def _batches(programs: Programs, batches: list[Batch]) -> list[dict[str, Any]]:
    """How many steps there were of each kind: phase, tokens, sequences, use of graphs, padded tokens."""
    kinds: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        mode, padded = programs.graph_use(batch.program)
        kinds[PHASES[batch.phase], batch.tokens, batch.sequences, mode, padded or 0] += batch.times
    names = ("phase", "tokens", "sequences", "mode", "padded")
    return [{**dict(zip(names, kind, strict=True)), "steps": times} for kind, times in sorted(kinds.items())]


def _is_whole(shard: Shard) -> bool:
    """Whether the process closed its shard with nothing failed or torn, and nothing run that no tap records."""
    if shard.damaged or any(line.status in ("off", "failed") for line in shard.lines(TapLine)):
        return False
    return not _recorded(shard) or (bool(shard.header(CLOSED)) and not shard.header(FAILED))


def _recorded(shard: Shard) -> bool:
    """Whether its process came to record: what it left may have lost the line that says so."""
    return bool(shard.process or shard.lines(CallLine) or shard.damaged)


def _shard_notes(shards: list[Shard]) -> list[str]:
    notes = []
    for shard in filter(_recorded, shards):
        process = f"rank {shard.rank} (process {shard.pid})" if shard.process else shard.stem.name
        notes += [f"{line.name}: {line.detail}" for line in shard.lines(TapLine) if line.status == "off"]
        if shard.process and shard.process.recorder_reason:
            notes.append(f"not the native recorder: {shard.process.recorder_reason}")
        if shard.unread:
            notes.append(f"{process}: nothing of it is counted: {shard.unread}")
        elif not shard.header(CLOSED):
            lost = "what the torn lines tell is missing" if shard.damaged else "every step that had ended is here"
            notes.append(f"{process} ended without closing: {lost}")
        if loose := sum(shard.header(LOOSE_STEPS + phase) for phase in range(len(PHASES))):
            notes.append(f"{process}: {loose:,} steps are counted call by call: they are in no batch and no Program")
        if shard.damaged:
            notes.append(f"{process}: {len(shard.damaged)} torn lines left out")
    return notes


def ranks_of(shards: Sequence[Shard], programs: Programs) -> list[Rank]:
    """One for each rank that recorded, in order; the processes of one rank are one."""
    steps = _steps_by_rank(shards, programs)
    ranks: dict[int, Rank] = {}
    for shard in shards:
        if shard.process:
            rank, earlier = _rank(shard, shard.process, steps[shard.rank]), ranks.get(shard.rank)
            if earlier:
                rank = rank.model_copy(update={"pid": earlier.pid, "ended": rank.ended and earlier.ended})
            ranks[rank.rank] = rank
    return _without_single_replica([ranks[number] for number in sorted(ranks)])


def _rank(shard: Shard, process: ProcessLine, steps: Counter[str]) -> Rank:
    groups = {line.name: _engine_ranks(line.ranks, line.rank, process.rank) for line in shard.lines(GroupLine)}
    return Rank(
        rank=process.rank,
        pid=process.pid,
        places={**process.places, **{name: group.index(process.rank) for name, group in groups.items()}},
        groups=groups,
        steps={phase: times for phase, times in sorted(steps.items()) if times},
        ended=bool(shard.header(CLOSED)),
    )


def _engine_ranks(ranks: list[int], index: int, rank: int) -> list[int]:
    """A group's ranks as they count in the whole engine, in which this one, at `place` in the group, is `rank`."""
    return [member - ranks[index] + rank for member in ranks]


def _without_single_replica(ranks: list[Rank]) -> list[Rank]:
    """Without the replica's number where there is one replica."""
    if any(rank.places.get(REPLICA) for rank in ranks):
        return ranks
    return [
        rank.model_copy(update={"places": {name: n for name, n in rank.places.items() if name != REPLICA}})
        if REPLICA not in rank.groups
        else rank
        for rank in ranks
    ]


def _steps_by_rank(shards: Sequence[Shard], programs: Programs) -> dict[int, Counter[str]]:
    steps: dict[int, Counter[str]] = defaultdict(Counter)
    for batch in programs.batches:
        steps[batch.rank][PHASES[batch.phase]] += batch.times
    for shard in shards:
        for phase, name in enumerate(PHASES):
            steps[shard.rank][name] += shard.header(LOOSE_STEPS + phase)
    return steps


def first_ranks(ranks: Sequence[Rank]) -> list[int]:
    """The lowest rank of each replica: the ranks of one replica all run the same steps."""
    first: dict[int, int] = {}
    for rank in ranks:
        first.setdefault(rank.places.get(REPLICA, 0), rank.rank)
    return list(first.values())


NEVER_OPENED = "the window was never opened: kcap window start DIR opens it, and so does SIGUSR1 to kcap record"


def counted_windows(recording: list[Shard]) -> list[dict[str, int]]:
    """Of the first process: each window's `first` step, of all that the engine began, and how many `steps` count."""
    for shard in recording:
        if lines := shard.lines(WindowLine):
            ends = [line.recorded for line in lines[1:]] + [shard.header(STEPS)]
            return [
                {"first": line.first, "steps": max(0, end - line.recorded)}
                for line, end in zip(lines, ends, strict=True)
            ]
    return []


def session_notes(session: Session, shards: list[Shard]) -> list[str]:
    """What was noted while the engine ran, and a window that never opened."""
    notes = [line.detail for shard in shards for line in shard.lines(NoteLine)]
    if any(shard.process for shard in shards) and not session.opens and not session.window_file.exists():
        notes.append(NEVER_OPENED)
    return notes


def why_empty(metadata: Metadata) -> str:
    """Why a Recording holds no call that counts."""
    if NEVER_OPENED in metadata.notes:
        return NEVER_OPENED
    failed = [f"{tap.name} failed: {tap.detail}" for tap in metadata.taps if tap.status == "failed"]
    if failed:
        return "; ".join(failed)
    if ended := sum(metadata.steps.values()):
        steps = f"{ended} step{'' if ended == 1 else 's'} ended while the window was open"
        return f"{steps}, and no operator was called there on tensors with data"
    profiled = CoverageSummary.model_validate(metadata.coverage or {}).steps
    absent = sorted({tap.detail for tap in metadata.taps if (tap.name, tap.status) == ("steps", "absent")})
    if absent and not profiled:
        return "; ".join(absent)
    under_profiler = f"; the first {profiled} steps ran under the profiler (--check-coverage)" if profiled else ""
    what = "step ended" if metadata.framework else "operator was called"
    outside = metadata.dropped.get("off_step", 0)
    unknown = f", though {outside:,} operators ran: kcap doctor says whether it knows this {metadata.framework}'s steps"
    return f"no {what} while the window was open{under_profiler}{unknown if metadata.framework and outside else ''}"

"""recording.json: what was recorded, by what, with which taps, and what of it was lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap import __version__
from kcap.capture import told
from kcap.capture.config import Session
from kcap.capture.programs import Batch, Programs
from kcap.capture.ranks import first_ranks, rank_of, ranks_of
from kcap.capture.redact import redact_arguments, redact_command
from kcap.capture.shards import CLOSED, FAILED, OFF_STEP, OVERFLOW, SAMPLES_SKIPPED, TRACED, Shard
from kcap.schemas.recording import PHASES, Call, Metadata, Tap
from kcap.schemas.records import totals

RECORDERS = ("dispatcher", "dispatch_mode", "window")  # who fails when the recorder does


def _taps(shards: list[Shard]) -> list[Tap]:
    taps = []
    for shard in shards:
        process = shard.process
        known: dict[str, Any] = {"rank": int(process.get("rank", 0)), "pid": int(process.get("pid", 0))}
        lines = shard.lines.get("tap", [])
        failures = [line for line in lines if line["name"] in RECORDERS and line["status"] == "failed"]
        taps += [Tap(**{**known, **{k: line[k] for k in ("name", "status", "detail")}}) for line in lines]
        if shard.header(FAILED) and not failures:
            taps.append(Tap(name="dispatcher", status="failed", detail="it could write no more (disk full?)", **known))
        if process and not failures and not shard.header(FAILED):
            taps.append(Tap(name=process.get("recorder", "dispatcher"), **known))
    return taps


def make_metadata(
    session: Session, shards: list[Shard], programs: Programs, calls: list[Call], notes: list[str]
) -> Metadata:
    recording = [shard for shard in shards if shard.process]
    first = recording[0].process if recording else {}
    ranks = ranks_of(recording, programs)
    counted = first_ranks(ranks)
    steps: Counter[str] = Counter()
    for rank in ranks:
        steps.update(rank.steps if rank.rank in counted else {})
    dropped = {
        name: total
        for name, header in (
            ("overflow", OVERFLOW),
            ("samples", SAMPLES_SKIPPED),
            ("off_step", OFF_STEP),
            ("traced", TRACED),
        )
        if (total := sum(shard.header(header) for shard in recording))
    }
    return Metadata(
        kernel_ids="definition",
        kcap=__version__,
        model=session.model or first.get("model"),
        framework=first.get("framework") or session.framework,  # a command need not name its engine
        framework_version=first.get("framework_version"),
        engine_arguments=redact_arguments(session.engine_arguments),
        command=redact_command(session.command),
        client=redact_command(session.client),
        layers_recorded=first.get("layers"),
        layers_model=session.layers_model or first.get("layers"),
        device=first.get("device"),
        driver=first.get("driver"),
        torch=first.get("torch"),
        python=first.get("python"),
        world_size=max((_world(shard) for shard in recording), default=1),
        ranks=ranks,
        recorder=sorted({shard.process["recorder"] for shard in recording if "recorder" in shard.process}),
        complete=bool(recording) and all(map(_is_whole, shards)),
        taps=_taps(shards),
        steps={name: times for name, times in sorted(steps.items()) if times},
        batches=_batches(programs, [batch for batch in programs.batches if batch.rank in counted]),
        totals=totals(calls),
        dropped=dropped,
        windows=told.windows(recording),
        notes=sorted({*_notes(recording), *told.notes(session, shards), *notes}),
    )


def _world(shard: Shard) -> int:
    return max(int(shard.process.get("world_size", 1)), rank_of(shard) + 1)


def _batches(programs: Programs, batches: list[Batch]) -> list[dict[str, Any]]:
    """How many steps there were of each kind: phase, tokens, sequences, use of graphs, padded tokens."""
    kinds: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        mode, padded = programs.graph_use(batch.program)
        kinds[PHASES[batch.phase], batch.tokens, batch.sequences, mode, padded or 0] += batch.times
    names = ("phase", "tokens", "sequences", "mode", "padded")
    return [{**dict(zip(names, kind, strict=True)), "steps": times} for kind, times in sorted(kinds.items())]


def _is_whole(shard: Shard) -> bool:
    """Whether the process closed its shard with nothing failed, and nothing run that no tap records."""
    if any(line["status"] in ("off", "failed") for line in shard.lines.get("tap", [])):
        return False
    return not shard.process or (bool(shard.header(CLOSED)) and not shard.header(FAILED))


def _notes(shards: list[Shard]) -> list[str]:
    notes = []
    for shard in shards:
        notes += [f"{line['name']}: {line['detail']}" for line in shard.lines.get("tap", []) if line["status"] == "off"]
        reason = shard.process.get("recorder_reason")
        if reason:
            notes.append(f"not the native recorder: {reason}")
        if not shard.header(CLOSED):
            notes.append(f"{_whose(shard)} ended without closing: every step that had ended is here")
        if shard.torn:
            notes.append(f"{_whose(shard)}: {shard.torn} torn lines left out")
    return notes


def _whose(shard: Shard) -> str:
    return f"rank {rank_of(shard)} (process {shard.process.get('pid')})"

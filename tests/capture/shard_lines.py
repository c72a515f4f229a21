"""The shard of a process, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Session
from kcap.capture.shards.counts import CLOSED, LOOSE_STEPS, OVERFLOW, STEPS, Counts
from kcap.schemas.recording.recording import Recording

Line = dict[str, Any]
MATRIX = {"tensor": {"shape": [4, 4], "dtype": "float32", "device": "cpu", "storage": 0}}


def call(number: int, operator: str, *values: Any, **more: Any) -> Line:
    args = [{"name": f"a{i}", "value": value} for i, value in enumerate(values)]
    return {"t": "call", "id": number, "operator": operator, "args": args, **more}


def step_lines(program: list[int], phase: int = 1, batch: int = 0) -> list[Line]:
    """A program, and the batch that ran it."""
    shape = {"program": batch, "phase": phase, "tokens": 4, "sequences": 4}
    return [{"t": "program", "id": batch, "calls": program}, {"t": "batch", "id": batch, **shape}]


def write_shard(
    session: Session, rank: int, lines: list[Line], batches: list[int], loose: dict[int, int] | None = None,
    **headers: int,
) -> Path:  # fmt: skip
    """One process's shard: its lines after the first, how often each batch ran, loose counts by call."""
    stem = Path(session.directory) / f"host-{100 + rank}"
    process = {"t": "process", "pid": 100 + rank, "rank": rank, "recorder": "RecordFunction", "world_size": 2}
    stem.with_suffix(".jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in [process, *lines]))
    counts = Counts(stem.with_suffix(".counts"), create=True)
    counts.cells[CLOSED], counts.cells[STEPS] = headers.get("closed", 1), sum(batches)
    counts.cells[OVERFLOW] = headers.get("overflow", 0)
    counts.cells[LOOSE_STEPS + 1] = headers.get("loose_steps", 0)
    for number, times in enumerate(batches):
        counts.cells[counts.batch(number)] = times
    for number, times in (loose or {}).items():
        counts.cells[counts.loose(number, 1)] = times
    return stem


def files(recording: Recording) -> dict[str, bytes]:
    """Every file of a Recording, by its path in it."""
    files_in = (path for path in recording.path.rglob("*") if path.is_file())
    return {str(path.relative_to(recording.path)): path.read_bytes() for path in files_in}

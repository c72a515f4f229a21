"""Reads what an engine process left: its lines, its counts, its notes. Torn last lines are expected, not errors."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

KERNELS = "kernels"  # the sources of kernels, in the session's directory

# The layout of native/shard.h.
MAGIC = 0x31304341504B0A
MAX_BATCHES, MAX_CALLS, PHASES, HEADER = 1 << 16, 1 << 17, 4, 64
CLOSED, FAILED, STEPS, OVERFLOW, TRACED, OFF_STEP, SAMPLES_SKIPPED, LOOSE_STEPS = 1, 2, 3, 4, 5, 6, 7, 16
BYTES = 8 * (HEADER + MAX_BATCHES + MAX_CALLS * PHASES)


class Counts:
    """The shared mapping of counters, read (or, by the Python recorder, written) in place."""

    def __init__(self, path: Path, create: bool = False) -> None:
        import os

        if create:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, BYTES)
        access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
        with path.open("r+b" if create else "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=access)
        if len(mapped) < BYTES:
            raise ValueError("not a counts file")
        self.cells = memoryview(mapped)[:BYTES].cast("Q")
        if create:
            self.cells[0] = MAGIC
        elif self.cells[0] != MAGIC:
            raise ValueError("not a counts file")

    @staticmethod
    def batch(index: int) -> int:
        return HEADER + index

    @staticmethod
    def loose(call: int, phase: int) -> int:
        return HEADER + MAX_BATCHES + call * PHASES + phase


@dataclass
class Shard:
    """One process's lines, by their kind, with its counters."""

    stem: Path
    process: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    counts: Counts | None = None
    torn: int = 0

    def header(self, index: int) -> int:
        return self.counts.cells[index] if self.counts else 0

    def batch_count(self, index: int) -> int:
        return self.counts.cells[self.counts.batch(index)] if self.counts and index < MAX_BATCHES else 0

    def loose_counts(self, call: int) -> list[int]:
        if self.counts is None or call >= MAX_CALLS:
            return [0] * PHASES
        start = self.counts.loose(call, 0)
        return list(self.counts.cells[start : start + PHASES])


def read_shard(stem: Path) -> Shard:
    """Read the shard `stem` (a path without ending); what is torn or damaged is counted, the rest is kept."""
    shard = Shard(stem)
    for suffix in (".jsonl", ".notes"):
        for line in _lines(stem.with_name(stem.name + suffix)):
            if line is None or not isinstance(line.get("t"), str):
                shard.torn += 1
            else:
                shard.lines.setdefault(line.pop("t"), []).append(line)
    shard.process = (shard.lines.get("process") or [{}])[0]
    try:
        shard.counts = Counts(stem.with_name(stem.name + ".counts"))
    except (OSError, ValueError):
        shard.counts = None
    return shard


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = orjson.loads(raw)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


def stems(directory: Path) -> list[Path]:
    """The shards in a session's directory, in a fixed order."""
    found = {path.with_suffix("") for ending in ("jsonl", "notes") for path in directory.glob(f"*.{ending}")}
    return sorted(found)


def progress(directory: Path) -> tuple[int, int]:
    """(processes that record, steps ended so far) by the counters alone: cheap enough to ask twice a second."""
    steps = [0]
    for path in directory.glob("*.counts"):
        try:
            steps.append(Counts(path).cells[STEPS])
        except (OSError, ValueError):
            continue
    return len(steps) - 1, max(steps)


def all_closed(directory: Path, is_gone: Callable[[Path], bool] = lambda path: False) -> bool:
    """Whether every process that opened a shard has closed it. `is_gone`: of a file of it, that it never will."""
    for path in directory.glob("*.counts"):
        if is_gone(path):
            continue
        try:
            cells = Counts(path).cells
        except (OSError, ValueError):
            continue
        if not (cells[CLOSED] or cells[FAILED]):
            return False
    return True

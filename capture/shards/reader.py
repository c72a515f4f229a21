"""Reads a shard: its lines by their kind, its counters. What is torn or damaged is left out, and named.

Torn last lines are expected, not errors: a process may be killed while it writes one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kcap.capture.shards.counts import MAX_BATCHES, MAX_CALLS, PHASE_COUNT, Counts
from kcap.capture.shards.lines import LINE, Line, ProcessLine

L = TypeVar("L", bound=Line)


@dataclass
class Shard:
    """One process's lines with its counters. `damaged`: file, line and reason of each line that was left out;
    `unread`: why there are no counters."""

    stem: Path
    counts: Counts | None = None
    damaged: list[str] = field(default_factory=list)
    unread: str = ""
    by_kind: dict[type[Line], list[Any]] = field(default_factory=dict)

    def lines(self, kind: type[L]) -> list[L]:
        return self.by_kind.get(kind, [])

    @cached_property
    def process(self) -> ProcessLine | None:
        """None where the process had not begun to record."""
        return next(iter(self.lines(ProcessLine)), None)

    @cached_property
    def rank(self) -> int:
        return self.process.rank if self.process else 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def header(self, index: int) -> int:
        return self.counts.cells[index] if self.counts else 0

    def batch_count(self, index: int) -> int:
        return self.counts.cells[self.counts.batch(index)] if self.counts and index < MAX_BATCHES else 0

    def loose_counts(self, call: int) -> list[int]:
        if self.counts is None or call >= MAX_CALLS:
            return [0] * PHASE_COUNT
        start = self.counts.loose(call, 0)
        return list(self.counts.cells[start : start + PHASE_COUNT])


def read_shards(directory: Path) -> list[Shard]:
    """The shards in a session's directory, in a fixed order; of one without the line that says of which process it is,
    nothing is counted."""
    with _collector_paused():
        shards = [read_shard(stem) for stem in stems(directory)]
    for shard in shards:
        if shard.process is None and shard.counts is not None:
            shard.counts, shard.unread = None, "no line says of which rank it is"
    return shards


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Lines hold no cycles, and looking for some among millions of new objects takes as long as reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_shard(stem: Path) -> Shard:
    """Read the shard `stem` (a path without ending); what is torn or damaged is noted, the rest is kept."""
    shard = Shard(stem)
    for suffix in (".jsonl", ".notes"):
        path = stem.with_name(stem.name + suffix)
        if not path.is_file():
            continue
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = LINE.validate_json(text)
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
                    where = ".".join(map(str, first["loc"]))
                    shard.damaged.append(f"{path.name}:{number}: {where}: {first['msg']}")
                else:
                    shard.by_kind.setdefault(type(line), []).append(line)
    try:
        shard.counts = Counts(stem.with_name(stem.name + ".counts"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # without the file's path
        shard.unread = f"its counters cannot be read ({reason})"
    return shard


def stems(directory: Path) -> list[Path]:
    return sorted({path.with_suffix("") for ending in ("jsonl", "notes") for path in directory.glob(f"*.{ending}")})

"""A shard as the native recorder writes it, for the recorder in Python: its lines, Programs, batches and counts."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from pathlib import Path

import orjson

from kcap.capture.shards import FAILED, LOOSE_STEPS, MAX_BATCHES, STEPS, Counts


class Shard:
    """Written to `stem`.jsonl and `stem`.counts, which must not be there. `steps`: that were counted."""

    def __init__(self, stem: Path) -> None:
        self._file = open(stem.with_name(stem.name + ".jsonl"), "xb", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._programs: dict[bytes, int] = {}
        self._batches: dict[tuple[int, ...], int] = {}
        counts = Counts(stem.with_name(stem.name + ".counts"), create=True)
        self.cells: memoryview[int] | defaultdict[int, int] = counts.cells
        self.steps = 0

    def write(self, line: bytes) -> None:
        """Append what ends in a line break; OSError on a full disk."""
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def close(self) -> None:
        """Give the file and the counters back. What a thread under way still writes or counts goes nowhere."""
        with self._lock:
            self._file.close()
        self.cells = defaultdict(int)

    def forget(self) -> None:
        """In a forked child, which may find the lock held for ever."""
        self._lock = threading.Lock()
        self.close()

    def count_loose(self, calls: list[int], phase: int) -> None:
        """Count calls by themselves, in no Program."""
        for number in calls:
            self.cells[Counts.loose(number, phase)] += 1

    def count_step(self, calls: list[int], phase: int, tokens: int, sequences: int, details: bytes) -> None:
        """Count a step that ran these calls. `details`: what `steps.jsonl` says of it beyond, as JSON members."""
        index, self.steps = self.steps, self.steps + 1
        key = (self.program(calls), phase, tokens, sequences)
        if key not in self._batches and len(self._batches) >= MAX_BATCHES:
            self.count_loose(calls, phase)
            self.cells[LOOSE_STEPS + phase] += 1
            self.cells[STEPS] += 1
            return
        shape = b'"program":%d,"phase":%d,"tokens":%d,"sequences":%d' % key
        if key not in self._batches:
            self._batches[key] = len(self._batches)
            self.write(b'{"t":"batch","id":%d,%s}\n' % (self._batches[key], shape))
        if details:
            self.write(b'{"t":"step","index":%d,%s%s}\n' % (index, shape, details))
        self.cells[Counts.batch(self._batches[key])] += 1
        self.cells[STEPS] += 1

    def program(self, calls: list[int]) -> int:
        """The number of the Program of these calls, in their order."""
        digest = hashlib.sha256(orjson.dumps(calls)).digest()
        if digest not in self._programs:
            self._programs[digest] = len(self._programs)
            self.write(orjson.dumps({"t": "program", "id": self._programs[digest], "calls": calls}) + b"\n")
        return self._programs[digest]

    def fail(self, reason: str) -> None:
        """Say that the recorder failed; on a full disk a counter alone says so."""
        self.cells[FAILED] = 1
        told = {"t": "tap", "name": "dispatch_mode", "status": "failed", "detail": reason}
        try:
            self.write(orjson.dumps(told) + b"\n")
        except OSError:
            return

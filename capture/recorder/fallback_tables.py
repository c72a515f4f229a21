"""What the fallback recorder keeps: interned calls with drift and Samples, and the shard that it writes."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from kcap.capture.recorder.arguments import ALL, Described, dtype_name, holds_scalar, is_plain
from kcap.capture.recorder.sampled_arguments import keeps_values
from kcap.capture.shards.counts import (
    FAILED,
    LAYER_NAMES,
    LOOSE_STEPS,
    MAX_BATCHES,
    MAX_CALLS,
    MAX_EXACT,
    MAX_KEYS,
    STEPS,
    Counts,
)

MAX_VARIANTS = 16


SAMPLES = 4


INTEGERS = (torch.int16, torch.int32, torch.int64)


class CallTable:
    """The distinct calls seen so far. `write` puts a line into the shard."""

    def __init__(self, write: Callable[[bytes], None], keep_tokens: bool) -> None:
        self._write = write
        self._keep_tokens = keep_tokens
        self._lock = threading.RLock()
        self._ids: dict[bytes, int] = {}
        self._calls: list[Described] = []
        self._exact: Counter[str] = Counter()  # calls of an operator
        self._rounded: dict[bytes, int] = {}
        self._shapes: Counter[int] = Counter()  # of a rounded call, how many it stands for
        self._regions: dict[int, int] = {}
        self._variants: Counter[bytes] = Counter()
        self._first: dict[bytes, Described] = {}
        self._drift: dict[str, tuple[int, int]] = {}  # operator -> which scalars, which offsets (a bit an argument)
        self._sampled: Counter[tuple[int, int]] = Counter()
        self._opened: set[str] = set()  # wrappers in which something that computes ran

    def is_custom(self, number: int) -> bool:
        return not (self._calls[number].operator.startswith("aten::") or self.is_region(number))

    def is_region(self, number: int) -> bool:
        """Whether its caller declared it a region, whatever runs in it."""
        return self._calls[number].region

    def opens(self, number: int, inside: Sequence[int]) -> bool:
        """Whether the call wraps what its layer runs: it then is no kernel, once something that computes ran in it."""
        call = self._calls[number]
        if any(name in LAYER_NAMES for name, _ in call.values) and any(self._calls[i].work for i in inside):
            self._opened.add(call.operator)
        return call.operator in self._opened

    def intern(self, call: Described) -> int | None:
        """The call's number, written down when it is new; None when the table is full.

        Past MAX_KEYS a rounded call's shapes are no longer counted, nor remembered.
        """
        masked = call.line(*self._drift.get(call.operator, (0, 0)))
        number = self._ids.get(masked)
        if number is not None:
            return number
        with self._lock:
            exact = self._exact[call.operator] < MAX_EXACT and len(self._calls) < MAX_CALLS // 2
            rounded = b"" if exact else call.rounded()
            number = None if exact else self._rounded.get(rounded)
            new, remembered = number is None, exact or len(self._ids) < MAX_KEYS
            if number is None:
                if len(self._calls) >= MAX_CALLS:
                    return None
                number = self._add(call)
                self._write(b'{"t":"call","id":%d,%s' % (number, masked[1:]))
            if remembered:
                self._ids[masked] = number
            if exact:
                self._exact[call.operator] += 1
                self._look_for_drift(call)
            else:
                self._rounded[rounded] = number
                if new or remembered:
                    self._count_shape(number)
        return number

    def _count_shape(self, number: int) -> None:
        self._shapes[number] += 1
        if self._shapes[number].bit_count() == 1:
            self._write_shapes(number)

    def _write_shapes(self, number: int) -> None:
        self._write(b'{"t":"shapes","call":%d,"shapes":%d}\n' % (number, self._shapes[number]))

    def finish(self) -> None:
        """Write what is only known at the end."""
        for number in self._shapes:
            self._write_shapes(number)

    def _add(self, call: Described) -> int:
        self._calls.append(call)
        return len(self._calls) - 1

    def _look_for_drift(self, call: Described) -> None:
        """Calls that differ only in offsets are one at once; scalars may have a meaning (a dimension)."""
        without_offsets, without_drift = call.line(0, ALL), call.line(ALL, ALL)
        if (first := self._first.setdefault(without_offsets, call)) is not call:
            self._note_drift(first, call)
        first = self._first.setdefault(without_drift, call)
        self._variants[without_drift] += 1
        if self._variants[without_drift] > MAX_VARIANTS:
            self._note_drift(first, call)

    def _note_drift(self, first: Described, call: Described) -> None:
        scalars, offsets = before = self._drift.get(call.operator, (0, 0))
        for i, (a, b) in enumerate(zip(first.args, call.args, strict=True)):
            scalars |= (holds_scalar(a) and a["value"] != b["value"]) << i
            offsets |= (not holds_scalar(a) and a["value"] != b["value"]) << i
        if (scalars, offsets) != before:
            self._drift[call.operator] = scalars, offsets
            line = {"t": "drift", "operator": call.operator, "scalars": scalars, "offsets": offsets}
            self._write(orjson.dumps(line) + b"\n")

    def region(self, number: int) -> int:
        """The number of the region that the call `number` turned out to be; its own when the table is full."""
        if number not in self._regions:
            if len(self._calls) >= MAX_CALLS:
                return number
            self._regions[number] = self._add(self._calls[number])
            self._write(orjson.dumps({"t": "region", "id": self._regions[number], "of": number}) + b"\n")
        return self._regions[number]

    def sample(self, number: int, call: Described, phase: int, step: int | None) -> None:
        """The first SAMPLES invocations in a phase; tensors on a GPU are not read: that would stall its stream."""
        if self._sampled[number, phase] >= SAMPLES or (number in self._shapes and call is not self._calls[number]):
            return
        tensors = {
            str(i): _content(tensor)
            for i, (name, tensor) in enumerate(call.values)
            if isinstance(tensor, torch.Tensor)
            and tensor.dtype in INTEGERS
            and self._kept(call, name)
            and tensor.is_cpu
            and is_plain(tensor)
        }
        scalars, offsets = call.drifted(*self._drift.get(call.operator, (0, 0)))
        if tensors or scalars or offsets:
            line = {"t": "sample", "call": number, "phase": phase, "slot": self._sampled[number, phase]}
            held = {"scalars": scalars, "offsets": offsets, "tensors": tensors}
            self._write(orjson.dumps({**line, **({} if step is None else {"step": step}), **held}) + b"\n")
        self._sampled[number, phase] += 1

    def _kept(self, call: Described, name: str) -> bool:
        if call.operator.startswith("aten::"):
            return self._keep_tokens
        return keeps_values(name, [argument for argument, _ in call.values] if call.external else None)


def _content(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.flatten().tolist()
    out: dict[str, Any] = {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "values": values,
    }
    return {**out, "low": min(values), "high": max(values)} if values else out


class ShardWriter:
    """Written to `stem`.jsonl and `stem`.counts, which must not be there. `steps`: that were counted."""

    def __init__(self, stem: Path) -> None:
        self._path = stem.with_name(stem.name + ".jsonl")
        self._path.touch(exist_ok=False)
        self._closed = False
        self._lock = threading.Lock()
        self._programs: dict[bytes, int] = {}
        self._batches: dict[tuple[int, ...], int] = {}
        counts = Counts(stem.with_name(stem.name + ".counts"), create=True)
        self.cells: memoryview[int] | defaultdict[int, int] = counts.cells
        self.steps = 0

    def write(self, line: bytes) -> None:
        """Append what ends in a line break; OSError on a full disk. No descriptor stays open, which a program might
        close and take for a file of its own."""
        with self._lock:
            if not self._closed:
                with self._path.open("ab", buffering=0) as file:
                    file.write(line)

    def close(self) -> None:
        """Give the file and the counters back. What a thread under way still writes or counts goes nowhere."""
        with self._lock:
            self._closed = True
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
        """Count a step that ran these calls. `details`: what `steps.jsonl` says of it beyond, as JSON members.

        Past MAX_BATCHES it is counted call by call, in no Program.
        """
        index, self.steps = self.steps, self.steps + 1
        if len(self._batches) >= MAX_BATCHES:
            self.count_loose(calls, phase)
            self.cells[LOOSE_STEPS + phase] += 1
            self.cells[STEPS] += 1
            return
        key = (self.program(calls), phase, tokens, sequences)
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
        line = {"t": "tap", "name": "dispatch_mode", "status": "failed", "detail": reason}
        try:
            self.write(orjson.dumps(line) + b"\n")
        except OSError:
            return

"""Calls as the lines that BackendBench and tritonbench share: each distinct line with the Calls that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kcap.bench.contents import Contents
from kcap.schemas.backendbench import Converted, TraceLine, Unwritable, convert_calls
from kcap.schemas.backendbench.trace_file import count_text
from kcap.schemas.recording.values import TensorSpec, Value, tensors
from kcap.schemas.results.export_loss import LossLedger

# Names that index with an integer tensor; the targets' random integers are -9..9.
INDEXING_WORDS = ("embedding", "gather", "index", "nll_loss", "scatter")
INDEXING = frozenset(
    "take take_along_dim put put_ one_hot cross_entropy_loss bincount repeat_interleave max_unpool2d max_unpool3d "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward segment_reduce "
    "value_selecting_reduction_backward".split()
)
DATA_ONLY = frozenset({"int8", "uint8"})  # quantized numbers, never wide enough to index with


@dataclass(slots=True)
class Entry:
    """A line, its arguments as text, and what it was made from: each Call with what the line leaves out of it."""

    line: TraceLine
    args: str
    converted: list[Converted] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.line.operator.split(".")[0]

    @property
    def base(self) -> str:
        """The operator without namespace and overload."""
        return self.line.operator.split(".")[1]

    def text(self) -> str:
        """The line in a trace file; Unwritable if it is too long, or its count too large."""
        return count_text(self.line.count, self.args)

    def lose(self, ledger: LossLedger, reason: str) -> None:
        """Its Calls are not exported."""
        for converted in self.converted:
            ledger.lose(converted.call.operator, reason, converted.call.total)

    def keep(self, ledger: LossLedger) -> None:
        """Its Calls are exported, but for what the line leaves out."""
        for converted in self.converted:
            for reason in converted.reduced:
                ledger.reduce(converted.call.operator, reason, converted.call.total)

    def tensors(self) -> Iterator[TensorSpec]:
        for value in (*self.line.args, *self.line.kwargs.values()):
            yield from (spec for _, spec in tensors(value))

    def values(self) -> Iterator[Value]:
        """Every argument, and every item of a list."""
        upcoming: list[Value] = [*self.line.args, *self.line.kwargs.values()]
        while upcoming:
            value = upcoming.pop()
            yield value
            if isinstance(value, list):
                upcoming.extend(value)


def entries(contents: Contents, ledger: LossLedger) -> list[Entry]:
    """By operator, then the most frequent first; what has no line goes to the ledger."""
    by_line: dict[tuple[str, str], Entry] = {}
    for converted in convert_calls(contents.kernels, contents.samples):
        if converted.line is None:
            ledger.lose(converted.call.operator, converted.missing, converted.call.total)
            continue
        entry = by_line.setdefault((converted.line.operator, converted.text), Entry(converted.line, converted.text))
        entry.line = entry.line.joined(converted.line) if entry.converted else converted.line
        entry.converted.append(converted)
    ordered = sorted(by_line.values(), key=lambda entry: (entry.line.operator, -entry.line.count, entry.args))
    return [entry for entry in ordered if _fits(entry, ledger)]


def _fits(entry: Entry, ledger: LossLedger) -> bool:
    try:
        entry.text()
    except Unwritable as error:
        entry.lose(ledger, str(error))
        return False
    return True


def indexes(entry: Entry) -> bool:
    """Whether random integers could make it read memory that nobody checked."""
    looks_up = entry.base in INDEXING or any(word in entry.base for word in INDEXING_WORDS)
    if entry.namespace == "aten" and not looks_up:
        return False
    return any(spec.dtype.startswith(("int", "uint")) and spec.dtype not in DATA_ONLY for spec in entry.tensors())

"""One line of a trace file, and the bounds that every line keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kcap.schemas.recording.operators import from_trace
from kcap.schemas.recording.values import Value

MAX_LINE = 4 << 20  # bytes of a line: the longest in the published traces has 5,248
MAX_DEPTH = 32  # brackets inside brackets
MAX_COUNT = 2**40  # so that the total of millions of lines fits 64 bits
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
MAX_NUMEL = 2**62
MAX_TENSOR_BYTES = 16 << 40  # of memory that one tensor spans; no device holds more


@dataclass(frozen=True, slots=True)
class TraceLine:
    """An operator in the trace file's spelling, how often it was called so, and its arguments.

    `line` is its number in the file. The tensors' storages are numbered in order of appearance: the format
    cannot say that two share memory.
    """

    operator: str
    count: int
    args: list[Value]
    kwargs: dict[str, Value]
    line: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The operator in the Recording's spelling: `aten::mm`."""
        return from_trace(self.operator)

    def joined(self, other: TraceLine) -> TraceLine:
        """This line, with the count of an equal one added."""
        return replace(self, count=self.count + other.count)

"""What a profiled step recorded, in order: the other side that a trace is held against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ran:
    """One recorded Call of a step, by its id in the Recording.

    `function`: the kernel's own name, where the Call is the launch of one (Triton).
    """

    call: int
    operator: str
    function: str | None = None
    region: bool = False

    @property
    def base(self) -> str:
        return base(self.operator)


@dataclass(frozen=True)
class Replayed:
    """A CUDA graph replayed at this point of a step.

    What each of `calls` added to it while it was captured, in nodes (kernels, copies, memsets) of `total` (0: not
    known): `ranges`, from the first to past the last, where a region's hold those of the calls inside it. Empty: not
    known.
    """

    calls: list[Ran]
    total: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def owners(self, count: int) -> list[int | None] | None:
        """Which of `calls` each of `count` nodes is of (None: of none); None if the numbers do not fit `count`."""
        if self.total != count or len(self.ranges) != len(self.calls):
            return None
        owners: list[int | None] = [None] * count
        for number, (start, end) in enumerate(self.ranges):  # a call comes after the one around it
            if not 0 <= start <= end <= count:
                return None
            owners[start:end] = [number] * (end - start)
        return owners


@dataclass(frozen=True)
class ProfiledStep:
    """A step that ran under the profiler, bracketed there by spans named `kcap:step:<index>`."""

    index: int
    items: list[Ran | Replayed]

    def ran(self) -> Iterator[Ran]:
        """The Calls that were dispatched or launched, without those of graphs."""
        return (item for item in self.items if isinstance(item, Ran))

    def replayed(self) -> list[Replayed]:
        return [item for item in self.items if isinstance(item, Replayed)]


def base(operator: str) -> str:
    """`aten::add.Tensor` -> `aten::add`: a profiler does not name the overload."""
    return operator.split(".", 1)[0]


# What follows a function's name in its kernel's: older Triton's signature, or C++ arguments.
_SPECIALIZED = re.compile(r"_\d+[cd]\w*|[^\w].*", re.DOTALL)


class Functions:
    """The functions that these Calls launch, found by the names of kernels."""

    def __init__(self, ran: Iterable[Ran]) -> None:
        self._names = sorted({call.function for call in ran if call.function}, key=len, reverse=True)
        self._found: dict[str, str | None] = dict(zip(self._names, self._names, strict=True))

    def match(self, kernel: str) -> str | None:
        """The function whose kernel this is: of its very name, or the longest that it specializes."""
        if kernel not in self._found:
            names = (name for name in self._names if kernel.startswith(name))
            self._found[kernel] = next((name for name in names if _SPECIALIZED.fullmatch(kernel, len(name))), None)
        return self._found[kernel]

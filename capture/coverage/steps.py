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

    `nodes`: how many kernels, copies and memsets each of `calls` added on its own while the graph was captured (a
    region without those of the calls inside it); empty: not known. `total`: those of the whole graph; 0: not known.
    """

    calls: list[Ran]
    nodes: list[int] = field(default_factory=list)
    total: int = 0


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

"""A profiled step from both sides: the Calls that it recorded in order, and the operators that its trace shows.

`align` gives each operator of the trace its Call, by kcap's own rule of what is recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kcap.capture.fold.coverage.trace import Op, Span, Thread, Trace
from kcap.schemas.results.plan import NAMESPACE


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
    known. `kernels`: each node's name, empty where the GPU runs nothing for it; `after`: the nodes that a node waits
    for, unless that is the one before it alone.
    """

    calls: list[Ran]
    total: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    after: Mapping[int, list[int]] = field(default_factory=dict)

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

    def captured_nodes(self, names: Iterable[str]) -> list[int] | None:
        """The node of each kernel, in the order in which they were captured; None unless `names` are theirs."""
        running = [node for node, name in enumerate(self.kernels) if name]
        same = [_kind(name) for name in names] == [_kind(self.kernels[node]) for node in running]
        return running if same else None

    def nodes_of(self, names: Iterable[str]) -> list[int | None]:
        """The node of each kernel, by its name, in the order in which they started; None where none is left.

        Branches run beside each other, so that kernels start in another order than they were captured in. A kernel is
        the first node of its name that waits for nothing any more.
        """
        waits = self._waits()
        left: dict[str, list[int]] = defaultdict(list)
        for node, name in enumerate(self.kernels):
            if name:
                left[_kind(name)].append(node)
        done: set[int] = set()
        nodes: list[int | None] = []
        for name in names:
            of_name = left[_kind(name)]
            if not of_name:
                nodes.append(None)
                continue
            first = next((node for node in of_name if waits[node] <= done), of_name[0])
            of_name.remove(first)
            done.add(first)
            nodes.append(first)
        return nodes

    def _waits(self) -> list[set[int]]:
        """For each node those before it that run something on the GPU."""
        waits: list[set[int]] = []
        for node in range(len(self.kernels)):
            before = self.after.get(node, [node - 1] if node else [])
            if len(before) == 1 and not self.kernels[before[0]]:
                waits.append(waits[before[0]])  # shared: thousands may wait for one join
                continue
            waits.append({found for other in before for found in ([other] if self.kernels[other] else waits[other])})
        return waits


def _kind(kernel: str) -> str:
    """A kernel's name; of copies and fills, which the driver carries out as it likes, only that they are."""
    return next((kind for kind in ("memcpy", "memset") if kernel.lower().startswith(kind)), kernel)


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


ATEN = ("aten::", "prim::", "prims::")  # the recorder takes what runs inside one for its detail
MODULE = "tvm::"  # how the names of a library's functions begin
DETAILS = (MODULE, "pynccl::")  # an operator that runs one of these alone stays the kernel

# What follows a function's name in its kernel's: older Triton's signature, or C++ arguments.
_SPECIALIZED = re.compile(r"_\d+[cd]\w*|[^\w].*", re.DOTALL)
_OF_TVM = re.compile(r"(\w+)_kernel(?:_\d+)?", re.ASCII)  # a function's kernels, of which it launches each once


class Functions:
    """The functions that these Calls launch, found by the names of kernels."""

    def __init__(self, ran: Iterable[Ran]) -> None:
        calls = [call for call in ran if call.function]
        self._of_tvm = {call.function for call in calls if call.operator.startswith(MODULE)}
        names = {call.function or "" for call in calls} - self._of_tvm
        self._names = sorted(names, key=len, reverse=True)
        self._found: dict[str, str | None] = dict(zip(self._names, self._names, strict=True))

    def match(self, kernel: str) -> str | None:
        """The function whose kernel this is: of its very name, the longest that it specializes, or TVM's."""
        if kernel not in self._found:
            names = (name for name in self._names if kernel.startswith(name))
            function = next((name for name in names if _SPECIALIZED.fullmatch(kernel, len(name))), None)
            of_tvm = _OF_TVM.fullmatch(kernel)
            self._found[kernel] = of_tvm[1] if of_tvm and of_tvm[1] in self._of_tvm else function
        return self._found[kernel]

    def counted_as(self, function: str, kernel: str = "") -> str:
        """By what the calls of `function` are counted: of TVM's, which may launch several, by each `kernel`, the first
        if none is named."""
        return function if function not in self._of_tvm else kernel or f"{function}_kernel"


@dataclass
class Occurrence:
    """A recorded operator as the profiler saw it: `parent` is the custom one around it, `ran` the Call that it is."""

    base: str
    parent: Occurrence | None
    step: int
    ran: Ran | None = None
    region: bool = False
    detail: bool = False

    @property
    def aten(self) -> bool:
        return self.base.startswith(ATEN)


class Spans:
    """Which step a thread was in at a time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in self._spans]

    def at(self, time: float) -> Span | None:
        last = self.begun(time)
        return last if last is not None and time <= last.end else None

    def begun(self, time: float) -> Span | None:
        """The last span that began until then."""
        after = bisect_right(self._starts, time)
        return self._spans[after - 1] if after else None


CAST = "aten::to"
SOLUTION = f"{NAMESPACE}::"  # runs in place of an operator, and the recorder takes what it runs


class ThreadStacks:
    """The operators of one thread, each with the one around it and the recorded one that it belongs to."""

    def __init__(self, ops: list[Op], spans: Spans) -> None:
        self._ops = ops
        self._starts = [op.start for op in ops]
        self._above: list[int] = []
        self._owners: list[Occurrence | None] = []
        self._inside_aten: list[bool] = []
        self.occurrences: list[Occurrence] = []
        self._nest()
        self._calls_itself = self._find_autocast()
        replaced = {self._above[number] for number, op in enumerate(ops) if op.name.startswith(SOLUTION)}
        self._looked_into = self._calls_itself | replaced
        for number, op in enumerate(ops):
            self._add(op, self._above[number], spans.at(op.start))

    def _nest(self) -> None:
        stack: list[int] = []
        for number, op in enumerate(self._ops):
            while stack and self._ops[stack[-1]].end <= op.start:
                stack.pop()
            self._above.append(stack[-1] if stack else -1)
            stack.append(number)

    def _find_autocast(self) -> set[int]:
        """Operators that cast their arguments and call themselves, and no more, as autocast has them do: the recorder
        has those calls instead."""
        inside: dict[int, list[str]] = defaultdict(list)
        for number, above in enumerate(self._above):
            if above >= 0 and self._ops[above].name.startswith(ATEN):
                inside[above].append(base(self._ops[number].name))
        return {
            number
            for number, (*casts, last) in inside.items()
            if last == base(self._ops[number].name) and all(name == CAST for name in casts)
        }

    def _add(self, op: Op, above: int, span: Span | None) -> None:
        name, number = base(op.name), len(self._owners)
        in_operator = above >= 0 and self._ops[above].name.startswith(ATEN) and above not in self._looked_into
        inside = above >= 0 and (self._inside_aten[above] or in_operator)
        owner = self._owners[above] if above >= 0 else None
        if not inside and span is not None and number not in self._calls_itself:
            owner = Occurrence(name, owner, span.step)
            self.occurrences.append(owner)
        self._owners.append(owner)
        self._inside_aten.append(inside)

    def owner(self, time: float) -> Occurrence | None:
        """The recorded operator that ran at `time`, the innermost one."""
        number = bisect_right(self._starts, time) - 1
        while number >= 0 and self._ops[number].end < time:
            number = self._above[number]
        return self._owners[number] if number >= 0 else None


class Stacks:
    """All threads' operators, and each step's recorded ones in order."""

    def __init__(self, trace: Trace) -> None:
        spans: dict[Thread, list[Span]] = defaultdict(list)
        for span in trace.spans:
            spans[span.thread].append(span)
        self._spans = {thread: Spans(own) for thread, own in spans.items()}
        self._threads = {thread: ThreadStacks(trace.ops.get(thread, []), own) for thread, own in self._spans.items()}
        self.seen = {base(op.name) for ops in trace.ops.values() for op in ops}
        self.steps: dict[int, list[Occurrence]] = {span.step: [] for span in trace.spans}
        for thread in self._threads.values():
            for occurrence in thread.occurrences:
                self.steps[occurrence.step].append(occurrence)

    def step(self, thread: Thread, time: float, default: int) -> int:
        """The step that this thread was in."""
        spans = self._spans.get(thread)
        span = spans.at(time) if spans else None
        return span.step if span else default

    def owner(self, thread: Thread, time: float) -> Occurrence | None:
        stacks = self._threads.get(thread)
        return stacks.owner(time) if stacks else None


def align(occurrences: list[Occurrence], step: ProfiledStep) -> Counter[str]:
    """Give each occurrence its Call: the n-th of an operator is its n-th. How often each operator was profiled."""
    queues: dict[str, Iterator[Ran]] = {}
    calls: dict[str, list[Ran]] = defaultdict(list)
    for ran in step.ran():
        calls[ran.base].append(ran)
    for name, of_name in calls.items():
        queues[name] = iter(of_name)
    for occurrence in occurrences:
        occurrence.detail = _is_detail(occurrence)
        if not occurrence.aten and not occurrence.detail:
            _mark_region(occurrence, next(queues.get(occurrence.base, iter(())), None))
    profiled: Counter[str] = Counter()
    for occurrence in occurrences:
        parent = occurrence.parent
        occurrence.detail |= occurrence.aten and parent is not None and not parent.region
        if occurrence.aten and not occurrence.detail:
            occurrence.ran = next(queues.get(occurrence.base, iter(())), None)
        profiled[occurrence.base] += not occurrence.detail
    return profiled


def _is_detail(occurrence: Occurrence) -> bool:
    """Whether it is what a recorded kernel alone runs: a function of a module, or a collective of NCCL's."""
    around = occurrence.parent.ran if occurrence.parent is not None else None
    return occurrence.base.startswith(DETAILS) and around is not None and not around.region


def _mark_region(occurrence: Occurrence, ran: Ran | None) -> None:
    occurrence.ran = ran
    occurrence.region |= ran is not None and ran.region
    if occurrence.parent is not None:
        occurrence.parent.region = True

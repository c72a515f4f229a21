"""Gives every kernel of the profiled steps to one of the Calls that the step recorded, or says why it cannot.

What a replayed CUDA graph ran on the GPU is given to the Calls that were captured in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kcap.capture.fold.coverage.steps import ATEN, Functions, ProfiledStep, Ran, Replayed, Spans, Stacks, align
from kcap.capture.fold.coverage.trace import STEP, Gpu, Launch, Trace
from kcap.schemas.results.coverage import Disagreement, KernelTime

NO_CALL = "no recorded call was under way when it was launched"


NO_LAUNCH = "its launch is unknown"


OTHER_THREAD = "launched by another thread than the step's"


NO_GRAPH = "a graph was replayed that the recorder did not see"


GRAPHS = "cudaGraphLaunch"


@dataclass
class Attributed:
    """A step's kernels in the order in which they started, and where profiler and recorder count differently."""

    index: int
    kernels: list[KernelTime] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)


def attribute(trace: Trace, steps: Iterable[ProfiledStep]) -> list[Attributed]:
    """Hold each step's recorded Calls against what the profiler saw of it, in the order given.

    ValueError if two steps have one index: steps of several processes need a trace each.
    """
    stacks = Stacks(trace)
    work: dict[int, _Work] = {}
    for step in steps:
        if step.index in work:
            raise ValueError(f"two steps of index {step.index}")
        work[step.index] = _Work(step, stacks, trace)
    _divide(trace, stacks, work)
    learnt: KernelOperators = defaultdict(set)
    for each in work.values():
        each.attribute_plain(learnt)
    return [each.attributed(learnt) for each in work.values()]


def _divide(trace: Trace, stacks: Stacks, work: dict[int, _Work]) -> None:
    """Give each step its launches, and what has none or another thread's to the step that it fell into."""
    spans = Spans(trace.spans)
    for correlation, launch in trace.launches.items():
        own = work.get(stacks.step(launch.thread, launch.at, -1))
        if own is not None and launch.graph:
            own.graphs[correlation] = (launch, [])
    for event in trace.gpu:
        launched = trace.launches.get(event.correlation or 0)
        index = -1 if launched is None else stacks.step(launched.thread, launched.at, -1)
        if launched is not None and index >= 0:
            if index in work:
                work[index].add(launched, event)
            continue
        span = spans.begun(event.start) if launched is None else spans.at(launched.at)
        if span is not None and span.step in work:
            work[span.step].lost.append((event, NO_LAUNCH if launched is None else OTHER_THREAD))


class _Work:
    """What one step launched: plainly, by graphs (by correlation), and what cannot be attributed."""

    def __init__(self, step: ProfiledStep, stacks: Stacks, trace: Trace) -> None:
        self.step = step
        self.lost: list[Attribution] = []
        self.graphs: dict[int, tuple[Launch, list[Gpu]]] = {}
        self._launched: list[tuple[Launch, Gpu]] = []
        self._plain: list[Attribution] = []
        self._stacks, self._launches, self._on_gpu = stacks, trace.launches, bool(trace.gpu)
        self._counts = align(stacks.steps.get(step.index, []), step)
        self._bases = {ran.base for ran in step.ran()}
        self._functions = Functions(step.ran())
        self._function_counts: Counter[str] = Counter()

    def add(self, launch: Launch, event: Gpu) -> None:
        if launch.graph:
            self.graphs[event.correlation or 0][1].append(event)
        else:
            self._launched.append((launch, event))

    def attribute_plain(self, learnt: KernelOperators) -> None:
        """What was launched one by one; `learnt` takes in which operator launched which kernel."""
        queues: dict[str, list[Ran]] = defaultdict(list)
        for ran in self.step.ran():
            if ran.function:
                queues[ran.function].append(ran)
        for launch, event in sorted(self._launched, key=lambda pair: (pair[0].at, pair[1].start)):
            function = self._functions.match(event.name)
            owner = self._nth(function, event.name, queues[function]) if function else self._by_stack(launch)
            if isinstance(owner, Ran) and function is None:
                learnt[event.name].add(owner.base)
            self._plain.append((event, owner))

    def _nth(self, function: str, kernel: str, calls: list[Ran]) -> Ran | str:
        counted_as = self._functions.counted_as(function, kernel)
        number = self._function_counts[counted_as]
        self._function_counts[counted_as] += 1
        return calls[number] if number < len(calls) else _more(function)

    def _by_stack(self, launch: Launch) -> Ran | str:
        """The innermost recorded operator around the launch; a region's own launches are of no Call."""
        owner = self._stacks.owner(launch.thread, launch.at)
        kept = owner.parent if owner is not None and owner.detail else owner
        if kept is None:
            return NO_CALL
        if kept.ran is None:
            return _more(kept.base) if kept.base in self._bases else f"{kept.base} was not recorded"
        return of_region(kept.base) if kept.region else kept.ran

    def _of_graphs(self, learnt: KernelOperators) -> Iterator[Attribution]:
        """The step's n-th launch of a graph is its n-th replay."""
        replayed = iter(self.step.replayed())
        for _, events in sorted(self.graphs.values(), key=lambda pair: pair[0].at):
            graph = next(replayed, None)
            if graph is None:
                yield from ((event, NO_GRAPH) for event in events)
            else:
                yield from attribute_replay(events, graph, learnt)

    def attributed(self, learnt: KernelOperators) -> Attributed:
        attributions = [(event, owner, False) for event, owner in self._plain + self.lost]
        attributions += [(event, owner, True) for event, owner in self._of_graphs(learnt)]
        attributions.sort(key=lambda item: item[0].start)
        kernels = [
            _kernel(event, owner, graph, self._times(event, attributions[0][0])) for event, owner, graph in attributions
        ]
        return Attributed(self.step.index, kernels, list(self._disagreements()))

    def _times(self, event: Gpu, first: Gpu) -> dict[str, float]:
        """When `event` started and when it was launched, after the step's first kernel started."""
        launch = self._launches.get(event.correlation or 0)
        launched = {} if launch is None else {"launched_us": round(launch.handed_over - first.start, 3)}
        return {"start_us": round(event.start - first.start, 3), **launched}

    def _disagreements(self) -> Iterator[Disagreement]:
        """Where the profiler counts otherwise; of what it cannot see (a library's own calls) nothing is said."""
        if self.step.index not in self._stacks.steps:
            yield Disagreement(operator=f"{STEP}{self.step.index}", recorded=1)
            return
        recorded: Counter[str] = Counter()
        profiled = Counter(self._counts)
        for ran in self.step.ran():
            if ran.base in self._stacks.seen or ran.base.startswith(ATEN):
                recorded[ran.base] += 1
            elif ran.function and self._on_gpu:
                recorded[ran.function] += 1
                profiled[ran.function] = self._function_counts[self._functions.counted_as(ran.function)]
        if self._on_gpu:
            recorded[GRAPHS], profiled[GRAPHS] = len(self.step.replayed()), len(self.graphs)
        for name in sorted(recorded | profiled):
            if profiled[name] != recorded[name]:
                yield Disagreement(operator=name, profiled=profiled[name], recorded=recorded[name])


def _more(name: str) -> str:
    return f"{name} ran more often than it was recorded"


def _kernel(event: Gpu, owner: Ran | str, graph: bool, times: dict[str, float]) -> KernelTime:
    reason = owner if isinstance(owner, str) else of_region(owner.base) if owner.region else None
    call = owner.call if isinstance(owner, Ran) and reason is None else None
    return KernelTime(name=event.name, us=event.us, call=call, reason=reason, graph=graph, **times)


def of_region(name: str) -> str:
    """Why a kernel has no Call that is launched by a region, which is never timed, and by nothing recorded in it."""
    return f"launched by the region {name} itself"


UNKNOWN_NODES = "the graph's nodes are not known, and no call of it is known to launch this"


CAPTURED_OUTSIDE = "captured while no recorded call was under way"


SEVERAL = "the graph's nodes are not known, and it may be of several of its calls"


KernelOperators = dict[str, set[str]]  # the operators that launched a kernel plainly, by its name


Attribution = tuple[Gpu, Ran | str]  # the Call, or why there is none


def attribute_replay(events: list[Gpu], graph: Replayed, learnt: KernelOperators) -> list[Attribution]:
    """Every event of one replay, by the nodes that each Call added; by names where these are not known or differ."""
    captured = _captured_order(events)
    if graph.kernels and (found := _by_node_names(events, captured, graph, learnt)):
        return found
    return _by_nodes(captured, graph) or list(_by_names(captured, graph, learnt))


def _by_node_names(
    events: list[Gpu], captured: list[Gpu], graph: Replayed, learnt: KernelOperators
) -> list[Attribution] | None:
    """By the ids of the nodes, where the profiler tells these and each has its kernel's name; else by the names, and
    any other kernel by the operator that launched such outside of graphs."""
    owners = graph.owners(len(graph.kernels))
    if owners is None or not _names_agree(graph.kernels, owners, graph):
        return None
    if _have_ids(events) and (running := graph.captured_nodes(event.name for event in captured)):
        return [(event, _owner(owners[node], graph)) for event, node in zip(captured, running, strict=True)]
    ordered = sorted(events, key=lambda event: (event.start, event.stream))
    nodes = graph.nodes_of(event.name for event in ordered)
    if None in nodes and (by_count := _by_nodes(captured, graph)):
        return by_count
    others = [event for event, node in zip(ordered, nodes, strict=True) if node is None]
    by_name = iter(_by_names(others, graph, learnt))
    return [
        next(by_name) if node is None else (event, _owner(owners[node], graph))
        for event, node in zip(ordered, nodes, strict=True)
    ]


def _owner(number: int | None, graph: Replayed) -> Ran | str:
    return CAPTURED_OUTSIDE if number is None else graph.calls[number]


def _have_ids(events: list[Gpu]) -> bool:
    return all(event.node is not None for event in events)


def _captured_order(events: list[Gpu]) -> list[Gpu]:
    if _have_ids(events):
        return sorted(events, key=lambda event: (event.node or 0, event.start))
    return sorted(events, key=lambda event: (event.start, event.stream, event.node or 0))


def _by_nodes(events: list[Gpu], graph: Replayed) -> list[Attribution] | None:
    owners = graph.owners(len(events))
    if owners is None or not _names_agree([event.name for event in events], owners, graph):
        return None
    return [(event, _owner(owner, graph)) for event, owner in zip(events, owners, strict=True)]


def _names_agree(kernels: list[str], owners: list[int | None], graph: Replayed) -> bool:
    """Every kernel of a known function belongs to a Call that launches it, and no such Call lacks its kernel."""
    functions = Functions(graph.calls)
    lacking = {owner for owner in owners if owner is not None and graph.calls[owner].function}
    for kernel, owner in zip(kernels, owners, strict=True):
        name = functions.match(kernel)
        if name is not None and (owner is None or name != graph.calls[owner].function):
            return False
        if name is not None:
            lacking.discard(owner or 0)
    return not lacking


def _by_names(events: list[Gpu], graph: Replayed, learnt: KernelOperators) -> Iterator[Attribution]:
    functions = Functions(graph.calls)
    candidates: dict[str, list[Ran]] = defaultdict(list)
    for ran in graph.calls:
        if not ran.region:
            candidates[ran.function or ran.base].append(ran)
    keys = [_key(event.name, functions, candidates, learnt) for event in events]
    totals, used = Counter(keys), Counter[str]()
    for event, key in zip(events, keys, strict=True):
        if key not in candidates:
            yield event, key
        else:
            yield event, _one_of(candidates[key], used[key], totals[key])
            used[key] += 1


def _key(kernel: str, functions: Functions, candidates: dict[str, list[Ran]], learnt: KernelOperators) -> str:
    """Which of `candidates` launches this kernel, or why that is not known."""
    function = functions.match(kernel)
    if function is not None and function in candidates:
        return function
    operators = learnt.get(kernel, set()) & candidates.keys()
    if len(operators) == 1:
        return next(iter(operators))
    return SEVERAL if operators else UNKNOWN_NODES


def _one_of(calls: list[Ran], number: int, total: int) -> Ran | str:
    """One Call of an operator: the only one, or the `number`-th where each launches one kernel."""
    if len({ran.call for ran in calls}) == 1:
        return calls[0]
    return calls[number] if total == len(calls) else SEVERAL

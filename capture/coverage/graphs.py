"""Gives what a replayed CUDA graph ran on the GPU to the Calls that were captured in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from kcap.capture.coverage.steps import Functions, Ran, Replayed
from kcap.capture.coverage.trace import Gpu

UNKNOWN_NODES = "the graph's nodes are not known, and no call of it is known to launch this"
NO_CALL = "captured while no recorded call was under way"
SEVERAL = "the graph's nodes are not known, and it may be of several of its calls"

Learnt = dict[str, set[str]]  # the operators that launched a kernel plainly, by its name
Found = tuple[Gpu, Ran | str]  # the Call, or why there is none


def of_graph(events: list[Gpu], graph: Replayed, learnt: Learnt) -> list[Found]:
    """Every event of one replay, by the nodes that each Call added; by names where these are not known or differ."""
    ordered = _captured_order(events)
    return _by_nodes(ordered, graph) or list(_by_names(ordered, graph, learnt))


def _captured_order(events: list[Gpu]) -> list[Gpu]:
    if all(event.node is not None for event in events):
        return sorted(events, key=lambda event: (event.node or 0, event.start))
    return sorted(events, key=lambda event: (event.start, event.stream, event.node or 0))


def _by_nodes(events: list[Gpu], graph: Replayed) -> list[Found] | None:
    owners = graph.owners(len(events))
    if owners is None or not _names_agree(events, owners, graph):
        return None
    found = (NO_CALL if owner is None else graph.calls[owner] for owner in owners)
    return list(zip(events, found, strict=True))


def _names_agree(events: list[Gpu], owners: list[int | None], graph: Replayed) -> bool:
    """Every kernel of a known function belongs to a Call that launches it, and no such Call lacks its kernel."""
    functions = Functions(graph.calls)
    lacking = {owner for owner in owners if owner is not None and graph.calls[owner].function}
    for event, owner in zip(events, owners, strict=True):
        name = functions.match(event.name)
        if name is not None and (owner is None or name != graph.calls[owner].function):
            return False
        if name is not None:
            lacking.discard(owner or 0)
    return not lacking


def _by_names(events: list[Gpu], graph: Replayed, learnt: Learnt) -> Iterator[Found]:
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


def _key(kernel: str, functions: Functions, candidates: dict[str, list[Ran]], learnt: Learnt) -> str:
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

"""CUDA graphs of an engine with a plan: a set of them for each arm, and how often they ran each Solution.

An arm is what the engine's kernels are: its own, or with the Solutions of one plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kcap.bench.apply.seams import Replacements
from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.hooks.patching import Methods

Arm = int  # the number of a plan, or
ENGINE, CONTROL = -1, -2
Table = dict[Any, Any]  # where an engine keeps graphs, by what they are for


class GraphSets:
    """The graphs of each arm, of which the engine finds those of one."""

    def __init__(self) -> None:
        self._sets: dict[Arm, list[tuple[Table, Table]]] = {}

    def capture(
        self, arms: Sequence[Arm], tables: Callable[[], Sequence[Table]], original: Callable[[], Any],
        use: Callable[[Arm], None],
    ) -> Any:  # fmt: skip
        """Capture a set for each arm, by `original`; what it returns the first time. `tables`: where the engine keeps
        its graphs; `use`: lets the engine launch the kernels of an arm."""
        self._sets = {}  # an engine may capture more than once: the last graphs are its own
        results = []
        for arm in arms:
            for table in tables():
                table.clear()
            use(arm)
            results.append(original())
            self._sets[arm] = [(table, dict(table)) for table in tables()]
        return results[0]

    def show(self, arm: Arm) -> None:
        for table, graphs in self._sets.get(arm, ()):
            table.clear()
            table.update(graphs)

    def drop(self, arm: Arm) -> None:
        """Its graphs are not needed any more."""
        self._sets.pop(arm, None)


class GraphUses:
    """How often CUDA graphs ran each Solution: each was captured so often in a graph, and that is replayed."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self.replayed: Counter[int] = Counter()
        self._captures = ByIdentity[list[int]]()  # until the graph's own began
        self._held = ByIdentity[dict[int, int]]()  # those in the graph
        self._methods = Methods()

    def install(self) -> None:
        kind = torch.cuda.CUDAGraph
        self._methods.around(kind, "capture_begin", self._capture_begin)
        self._methods.around(kind, "capture_end", self._capture_end)
        self._methods.around(kind, "replay", self._replay)

    def _captured(self) -> list[int]:
        return [one.captured for one in self._replacements.placed]

    def _capture_begin(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        self._captures[graph] = self._captured()
        return result

    def _capture_end(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._captures.pop(graph) or self._captured()
        result = original(graph, *args, **kwargs)
        new = {i: now - then for i, (now, then) in enumerate(zip(self._captured(), before, strict=True)) if now > then}
        self._held[graph] = new
        return result

    def _replay(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        self.replayed.update(self._held.get(graph) or {})
        return original(graph, *args, **kwargs)

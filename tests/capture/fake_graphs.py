"""A class of graphs that needs no GPU: what is called while it captures is called, and a replay does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.window.window import StepShape, Window
from kcap.schemas.recording.recording import Call, Recording

X = torch.ones(4, 4)
Body = Callable[[], object]
Key = tuple[str, str, str]


def graph_class() -> type[Any]:
    """A new class, so that what one test patches no other sees. `fail` names the method that raises."""

    class Graph:
        fail = ""

        def __init__(self) -> None:
            self.log: list[str] = []

        def _do(self, what: str) -> str:
            if self.fail == what:
                raise RuntimeError(f"{what} failed")
            self.log.append(what)
            return what

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> str:
            return self._do("capture_begin")

        def capture_end(self) -> str:
            return self._do("capture_end")

        def replay(self) -> str:
            return self._do("replay")

        def raw_cuda_graph(self) -> str:
            return self._do("raw_cuda_graph")

        def raw_cuda_graph_exec(self) -> str:
            return self._do("raw_cuda_graph_exec")

    return Graph


class capturing:
    """As `torch.cuda.graph`: ends the capture also when the body raises."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.capture_begin(pool=None, capture_error_mode="thread_local")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph.capture_end()


def captured(kind: type[Any], *bodies: Body) -> Any:
    graph = kind()
    with capturing(graph):
        for body in bodies:
            body()
    return graph


def counts(recording: Recording) -> dict[Key, int]:
    """(operator, phase, mode) -> count, of kernels that do work."""
    found: Counter[Key] = Counter()
    for call in recording.kernels():
        for count in call.counts:
            found[call.operator, count.phase, count.mode] += count.count
    return dict(found)


def operators(calls: list[Call]) -> list[str]:
    return [call.operator for call in calls]


class Health(NamedTuple):
    status: Literal["ok", "failed", "off", "absent"]
    detail: str


def health(recording: Recording, tap: str = "cuda_graphs") -> Health:
    (found,) = [one for one in recording.metadata.taps if one.name == tap]
    return Health(found.status, found.detail)


class Engine:
    """A window as an engine has it: taps from the start, counting in steps once it is opened."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._output = directory / "out"
        self.session = Session(str(directory / "shards"), **options)
        self.session.write()
        self.window = Window(self.session)
        self.window.register()

    def open(self) -> None:
        self.window.start()

    def step(self, phase: str, *bodies: Body) -> None:
        self.window.begin(StepShape(phase, [1], [1]))
        for body in bodies:
            body()
        self.window.end()

    def close(self) -> Recording:
        self.window.close()
        return fold_session(self.session, self._output)

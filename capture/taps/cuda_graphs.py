"""CUDA graphs: what is called while one is captured is that graph's Program, and each replay runs it once.

torch's are followed by their class; a tap of another library tells of its own.

Nothing dispatches on a replay, so counts are calls × replays. A graph that was captured before kcap was there, or that
is launched past `CUDAGraph.replay`, is counted or told as unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson

from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.hooks.patching import Methods
from kcap.capture.recorder.recorder import Recorder
from kcap.capture.taps.external import contained
from kcap.errors import first_line

HANDED_OUT = ("raw_cuda_graph", "raw_cuda_graph_exec")


class Host(Protocol):
    """The window that the graphs belong to. `for_capture` opens its recorder before the window does."""

    capturing: int
    count_nodes: bool

    @property
    def open(self) -> bool: ...
    @property
    def recorder(self) -> Recorder | None: ...
    def for_capture(self) -> Recorder | None: ...
    def tap_failed(self, tap: str, error: BaseException) -> None: ...


class CudaGraphs:
    """Follows every `torch.cuda.CUDAGraph` of this process from its capture on.

    `describe` is the engine's: what it knows of the graph that is about to be captured (`size`, `scope`).
    """

    name = "cuda_graphs"

    def __init__(self, host: Host) -> None:
        self._host = host
        self.failed = host.tap_failed
        self.on = False
        self._local = threading.local()
        self.describe: Callable[[], dict[str, Any]] = dict
        self.captured = self.abandoned = self.replays = self.unknown = self.unkept = self.handed_out = 0
        self.unseen = ""  # the recorder, where it does not see what a graph captures
        self._numbers = ByIdentity[int]()
        self._newest = self._known = -1  # the last graph, and the last one whose memory is known
        self._unsampled = ""  # why no Sample is taken at a replay
        self._methods = Methods()

    def install(self, kind: Any = None) -> None:
        """Patch `kind`, torch's class of graphs if None."""
        import torch

        kind = kind or torch.cuda.CUDAGraph
        self.on = True
        self._methods.around(kind, "capture_begin", self._capture_begin)
        self._methods.around(kind, "capture_end", self._capture_end)
        self._methods.around(kind, "replay", self._replay)
        for name in HANDED_OUT:
            if hasattr(kind, name):
                self._methods.around(kind, name, self._hand_out)

    def uninstall(self) -> None:
        self.on = False
        if not self._host.capturing:  # else at the end of the capture, which is to be abandoned
            self._methods.undo()

    # ---- around the graph's own methods ----

    def _capture_begin(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        self._began(graph)
        return result

    def _capture_end(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = self._count_nodes() or 0
        with self._abandoned_on_failure():
            result = original(graph, *args, **kwargs)
        self._ended(graph, nodes)
        self._let_go()
        return result

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            self._let_go()
            raise

    def _replay(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        unfinished = self._host.open and self._launching(graph)
        result = original(graph, *args, **kwargs)
        if unfinished:
            self._launched()
        return result

    def _hand_out(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        self.handed_out += 1
        return original(graph, *args, **kwargs)

    # ---- graphs of other libraries than torch: any object that lives as long as the graph stands for it ----

    def capture(self, graph: Any, stream: int, run: Callable[[], Any]) -> Any:
        """What `run` calls on this thread is `graph`'s, which is being captured on `stream` (0: not known)."""
        self._began(graph, stream)
        with self._abandoned_on_failure():
            result = run()
            nodes = self._count_nodes() or 0
        self._ended(graph, nodes)
        self._let_go()
        return result

    def launch(self, graph: Any) -> None:
        """`graph` is about to be launched."""
        if self._host.open:
            self._launching(graph)

    # ---- what the tap makes of them ----

    @contained
    def _began(self, graph: Any, stream: int = 0) -> None:
        self._numbers.pop(graph)
        recorder = self._host.for_capture()
        if recorder is None:
            return
        if not recorder.sees_graphs:
            self.unseen = recorder.kind
        self._abandon()  # the last one, if it never ended
        self._local.info = _members(self.describe())
        recorder.graph_begin(self._host.count_nodes, stream)
        self._host.capturing += 1
        self._local.capturing, self._local.recorder = True, recorder

    @contained
    def _count_nodes(self) -> int:
        recorder = self._host.recorder
        counts = self._host.count_nodes and getattr(self._local, "capturing", False)
        return recorder.graph_nodes() if recorder and counts else 0

    def _capture_over(self) -> bool:
        """Whether this thread was capturing; it is no longer."""
        was = getattr(self._local, "capturing", False)
        self._host.capturing -= was
        self._local.capturing = False
        return was

    @contained
    def _abandon(self) -> None:
        if self._capture_over():
            self.abandoned += 1
            self._local.recorder.graph_abandon()

    def _let_go(self) -> None:
        """A tap that failed or was taken out on the way leaves no capture open."""
        if self._capture_over():
            self._local.recorder.graph_abandon()
        if not self.on and not self._host.capturing:
            self._methods.undo()

    @contained
    def _ended(self, graph: Any, nodes: int) -> None:
        recorder = self._host.recorder
        if not self._capture_over() or recorder is None:
            return
        number = recorder.graph_end(self._local.info, nodes)
        if number < 0:
            self.unkept += recorder.sees_graphs
            return
        self._numbers[graph] = self._newest = number
        self.captured += 1

    @contained
    def _launching(self, graph: Any) -> bool:
        """Whether `_launched` is to be called after the launch."""
        number = self._numbers.get(graph)
        recorder = self._host.recorder
        if number is None or recorder is None:
            self.unknown += 1
            return False
        if number > self._known:
            self.refresh()
        self.replays += 1
        return recorder.graph_launching(number)

    @contained
    def _launched(self) -> None:
        if self._host.recorder is not None:
            self._host.recorder.graph_launched()

    @contained
    def annotate(self, graph: Any, info: dict[str, Any]) -> None:
        """What an engine knows of a graph only after its capture."""
        recorder, number = self._host.recorder, self._numbers.get(graph)
        if recorder is not None and number is not None:
            recorder.line(orjson.dumps({"t": "annotation", "graph": number, **info}))

    @contained
    def refresh(self) -> None:
        """Look which memory the graphs captured so far keep for themselves, unless that is known."""
        if self._host.recorder is None or self._newest <= self._known:
            return
        self._known = self._newest
        try:
            self._host.recorder.graph_memory(memory_of_graphs())
        except RuntimeError as error:  # an allocator that does not report its memory
            self._unsampled = first_line(error)
            self._host.recorder.graph_memory(None)

    def health(self) -> tuple[str, str]:
        """Status and detail of the tap, for the Recording."""
        if not self.on:
            return "failed", ""
        before = "captured before recording began: what ran in them is unknown"
        unseen = f"whose calls are not recorded ({self.unseen} sees none)"
        lost = {
            f"replays of graphs {unseen if self.unseen else before}": self.unknown,
            "graphs could not be kept (too many calls)": self.unkept,
            "graphs were handed out as raw handles: launched from there, they are not seen": self.handed_out,
        }
        losses = [f"{number} {what}" for what, number in lost.items() if number]
        if losses:
            return "off", "; ".join(losses)
        if self.unseen:
            return "absent", f"no graph was replayed; {self.unseen} records no graph's calls"
        if not (self.captured or self.abandoned):
            return "absent", "no graph was captured"
        failed = f", {self.abandoned} captures failed" if self.abandoned else ""
        unsampled = f"; no Samples at replays: {self._unsampled}" if self._unsampled else ""
        return "ok", f"{self.captured} graphs captured, {self.replays} replays{failed}{unsampled}"


def _members(info: dict[str, Any]) -> bytes:
    return b"," + orjson.dumps(info)[1:-1] if info else b""


def memory_of_graphs() -> list[tuple[int, int]]:
    """The memory of torch's allocator that belongs to graphs' own pools, as addresses from and to."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    segments = torch.cuda.memory_snapshot()
    private = [segment for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)]
    return [(segment["address"], segment["address"] + segment["total_size"]) for segment in private]

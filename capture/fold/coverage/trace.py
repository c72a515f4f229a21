"""Reads a chrome trace of torch.profiler: the operators, launches, steps and GPU work in it."""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import orjson

from kcap.errors import FormatError

STEP = "kcap:step:"  # spans of these names bracket the steps, and calls that no dispatcher sees (`kcap:call:a::b`)
CALL = "kcap:call:"
IGNORED = "kcap:ignored"  # brackets what a compiler or an autotuner does, which is not recorded
MAX_BYTES = 512 << 20  # of JSON; some 1.5 million events
MAX_TIME = 1e18  # in µs; sums of such times stay finite
_OPERATOR = re.compile(r"[A-Za-z_]\w*::\w+(\.\w+)?", re.ASCII)
_STEP = re.compile(STEP + r"(\d{1,18})", re.ASCII)
_CPU = frozenset({"cpu_op", "user_annotation"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NODE_KEYS = ("graph node id", "graph node", "graphNodeId")

Thread: TypeAlias = tuple[str, str]  # process and thread


class Op(NamedTuple):
    start: float
    end: float
    name: str


class Span(NamedTuple):
    start: float
    end: float
    step: int
    thread: Thread


class Launch(NamedTuple):
    """The host's call that launched something: from `at` `until` it returned."""

    at: float
    until: float
    thread: Thread
    name: str

    @property
    def graph(self) -> bool:
        return self.name.startswith(("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"))

    @property
    def handed_over(self) -> float:
        """When the GPU was given it: a kernel as the call begins, a graph, of hundreds of nodes, as it returns."""
        return self.until if self.graph else self.at


class Gpu(NamedTuple):
    """A kernel, copy or memset as it ran on the GPU."""

    start: float
    us: float
    name: str
    correlation: int | None
    stream: int
    node: int | None


@dataclass
class Trace:
    """`ops` of each thread and `spans` in the order in which they began; `launches` by correlation. In µs. Without the
    operators and the GPU work of compilers and autotuners."""

    ops: dict[Thread, list[Op]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    launches: dict[int, Launch] = field(default_factory=dict)
    gpu: list[Gpu] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """The trace in `path` (.json or .json.gz); FormatError if it is damaged, too large or no trace."""
    try:
        document = orjson.loads(_content(path))
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{path}:{error.lineno}:{error.colno}", f"a damaged trace: {error.msg}") from None
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise FormatError(str(path), f"a damaged trace: {error}") from None
    except OSError as error:
        raise FormatError(str(path), f"not readable ({error.strerror})") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FormatError(str(path), "no chrome trace: it has no list of traceEvents")
    return _Reader().read(events)


def _content(path: Path) -> bytes:
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        content: bytes = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise FormatError(str(path), f"a trace of more than {MAX_BYTES >> 20} MiB is not read: profile fewer steps")
    return content


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self._external: dict[int, Thread] = {}
        self._launched_by: dict[int, int] = {}
        self._ignored: dict[Thread, list[tuple[float, float]]] = {}

    def read(self, events: Iterable[Any]) -> Trace:
        for event in events:
            if isinstance(event, dict) and event.get("ph") == "X":
                self._event(event, event.get("cat"), event.get("name"))
        trace = self.trace
        for ops in trace.ops.values():
            ops.sort(key=lambda op: (op.start, -op.end))
        trace.spans.sort(key=lambda span: span.start)
        self._move_launches()
        if self._ignored:
            self._leave_out_ignored()
        return trace

    def _event(self, event: dict[str, Any], kind: Any, name: Any) -> None:
        start, us = _number(event.get("ts")), _number(event.get("dur", 0))
        if not isinstance(name, str) or not isinstance(kind, str) or start is None or us is None or us < 0:
            return
        members = event.get("args")
        args = members if isinstance(members, dict) else {}
        thread = (_id(event.get("pid")), _id(event.get("tid")))
        if kind in _CPU:
            self._cpu(name, start, start + us, thread, _integer(args.get("External id")))
        elif kind in _LAUNCHES:
            self._launch(Launch(start, start + us, thread, name), args)
        elif kind in _GPU:
            node = next((number for key in _NODE_KEYS if (number := _integer(args.get(key))) is not None), None)
            stream = _integer(args.get("stream")) or 0
            self.trace.gpu.append(Gpu(start, us, name, _integer(args.get("correlation")), stream, node))

    def _cpu(self, name: str, start: float, end: float, thread: Thread, external: int | None) -> None:
        if external is not None:
            self._external[external] = thread
        if match := _STEP.fullmatch(name):
            self.trace.spans.append(Span(start, end, int(match[1]), thread))
        elif name == IGNORED:
            self._ignored.setdefault(thread, []).append((start, end))
        elif _OPERATOR.fullmatch(name.removeprefix(CALL)):
            self.trace.ops.setdefault(thread, []).append(Op(start, end, name.removeprefix(CALL)))

    def _launch(self, launch: Launch, args: dict[str, Any]) -> None:
        correlation, external = _integer(args.get("correlation")), _integer(args.get("External id"))
        if not correlation or correlation in self.trace.launches:
            return
        self.trace.launches[correlation] = launch
        if external is not None:
            self._launched_by[correlation] = external

    def _move_launches(self) -> None:
        """Move launches whose thread the profiler names differently from its operators' to the operator's thread."""
        threads = {*self.trace.ops, *(span.thread for span in self.trace.spans)}
        for correlation, external in self._launched_by.items():
            launch = self.trace.launches[correlation]
            if launch.thread not in threads and external in self._external:
                self.trace.launches[correlation] = launch._replace(thread=self._external[external])

    def _leave_out_ignored(self) -> None:
        trace = self.trace
        for thread, spans in self._ignored.items():
            outer: list[tuple[float, float]] = []
            for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                if not outer or start > outer[-1][1]:  # else it lies in the last one
                    outer.append((start, end))
            self._ignored[thread] = outer
        for thread, ops in trace.ops.items():
            trace.ops[thread] = [op for op in ops if not self._in_ignored(thread, op.start)]
        left_out = {number for number, one in trace.launches.items() if self._in_ignored(one.thread, one.at)}
        trace.gpu = [work for work in trace.gpu if work.correlation not in left_out]

    def _in_ignored(self, thread: Thread, time: float) -> bool:
        spans = self._ignored.get(thread, [])
        after = bisect_right(spans, (time, MAX_TIME))
        return after > 0 and time <= spans[after - 1][1]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_TIME:
        return None
    return float(value)


def _id(value: Any) -> str:
    return str(value) if isinstance(value, (int, str)) else ""


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

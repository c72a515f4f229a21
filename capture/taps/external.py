"""What taps in Python tell of: kernels launched from sources of their own, and calls into libraries."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from kcap.capture.hooks.binding import Named, named
from kcap.capture.recorder.recorder import Recorder
from kcap.capture.shards.counts import KERNELS

MOST_LAUNCHES = 1 << 16
CALL_SPAN, IGNORED_SPAN = "kcap:call:", "kcap:ignored"  # as kcap.capture.fold.coverage.trace reads them


class Host(Protocol):
    """The window that the calls belong to."""

    recorder: Recorder | None
    capturing: int  # captures of graphs under way

    @property
    def open(self) -> bool: ...
    @property
    def profiling(self) -> bool: ...
    def tap_failed(self, tap: str, error: BaseException) -> None: ...
    def note(self, text: str) -> None: ...


class PerThread(threading.local):
    """`spans`: of the library calls under way, what a profiler is to see of each. `ignored`: how deep in `ignoring`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.ignored = 0


class Externals:
    """Numbers the operators and launches that taps name, and passes their calls on to the recorder."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._host = host
        self._directory = directory / KERNELS
        self._operators: dict[tuple[str, tuple[str, ...], bool, bool], int] = {}
        self._launches: dict[bytes, int] = {}
        self._written: set[str] = set()
        self._groups: set[str] = set()
        self._thread = PerThread()

    @property
    def listening(self) -> bool:
        """Whether a call may be recorded now; the recorder knows for certain."""
        return (self._host.open or self._host.capturing > 0) and not self._thread.ignored

    @property
    def recorder_library(self) -> str:
        """The native recorder's file, for a tap in C++; empty without one."""
        return self._host.recorder.library if self._host.recorder is not None else ""

    def note(self, text: str) -> None:
        """For the Recording."""
        self._host.note(text)

    def failed(self, tap: str, error: BaseException) -> None:
        """The tap's own failure: noted, and the tap is to switch itself off."""
        self._host.tap_failed(tap, error)

    def operator(self, name: str, arguments: Sequence[str], work: bool = True, region: bool = False) -> int:
        key = (name, tuple(arguments), work, region)
        number = self._operators.get(key)
        if number is None:
            assert self._host.recorder is not None
            number = self._operators[key] = self._host.recorder.operator(name, arguments, work, region)
        return number

    def group(self, size: int, rank: int) -> str:
        """The name of a process group of which a call tells but its size and this process's rank in it."""
        name = f"rank {rank} of {size}"
        if name not in self._groups and self._host.recorder is not None:
            self._host.recorder.group(name, 0, size, rank)
            self._groups.add(name)
        return name

    def launch(self, fields: dict[str, Any]) -> int | None:
        """The number of what a kernel is launched with: the fields of a schemas Launch. None: there are too many.

        Beyond MOST_LAUNCHES, those that differ in their grid alone are one, without a grid.
        """
        body = orjson.dumps(fields)
        if body not in self._launches and len(self._launches) >= MOST_LAUNCHES:
            body = orjson.dumps({name: value for name, value in fields.items() if name != "grid"})
        number = self._launches.get(body)
        if number is None and len(self._launches) < 2 * MOST_LAUNCHES:
            assert self._host.recorder is not None
            number = self._launches[body] = self._host.recorder.launch(body)
        return number

    def source(self, name: str, text: bytes) -> None:
        """Keep a kernel's source; `name` is its SHA-256 with an ending. The file is whole, or not there: other
        processes of the session write it, too, and each of them may be killed."""
        if name in self._written:
            return
        if not (self._directory / name).exists():
            self._write(name, text)
        self._written.add(name)

    def _write(self, name: str, text: bytes) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, self._directory / name)
            except BaseException:
                os.unlink(file.name)
                raise

    def library(self, content: bytes) -> str:
        """Keep a compiled library; its name among the kernels' sources."""
        name = f"{hashlib.sha256(content).hexdigest()}.so"
        self.source(name, content)
        return name

    def kernel_name(self, name: str, function: str) -> None:
        """A profiler calls the kernel `name` that is `function` in its source here."""
        assert self._host.recorder is not None
        self._host.recorder.line(orjson.dumps({"t": "kernel_name", "name": name, "function": function}))

    def launched(self, operator: int, launch: int, values: Sequence[Any], enter: bool = False) -> bool:
        """A kernel is launched on this thread. `enter`: what runs until `leave` is its detail."""
        recorder = self._host.recorder
        recorded = recorder is not None and recorder.call(operator, launch, values, enter, False)
        if recorded and enter:
            self._thread.spans.append(None)
        return recorded

    def may_record(self, detail: bool) -> bool:
        """Whether `enter` may record what is called on this thread now: asked once, before a call is described."""
        return self._host.recorder is not None and self._host.recorder.may_record(detail)

    def enter(
        self,
        operator: str,
        arguments: Named,
        work: bool = True,
        detail: bool = False,
        launch: int = -1,
    ) -> bool:
        """A call into a library begins on this thread; False when it is not recorded, and then is not left.

        `work` False: the host's own (a plan). `detail`: not recorded inside another library's call. `launch`: the
        number of its launch, if it has one.
        """
        recorder = self._host.recorder
        if recorder is None:
            return False
        names, values = arguments
        entered = recorder.call(self.operator(operator, names, work), launch, values, True, detail)
        if entered:
            self._thread.spans.append(_span(f"{CALL_SPAN}{operator}") if self._host.profiling else None)
        return entered

    def enter_region(self, operator: int, values: Sequence[Any]) -> bool:
        """What runs on this thread until `leave_region` is in a region; False when it is not, and then is not left."""
        recorder = self._host.recorder
        return recorder is not None and recorder.call(operator, -1, values, True, False)

    def leave_region(self) -> None:
        if self._host.recorder is not None:
            self._host.recorder.leave()

    def leave(self) -> None:
        spans = self._thread.spans
        if spans and (span := spans.pop()) is not None:
            span.__exit__(None, None, None)
        if self._host.recorder is not None:
            self._host.recorder.leave()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Record nothing of this thread: it compiles or tunes, which caches may have done already at another start."""
        recorder = self._host.recorder
        span = _span(IGNORED_SPAN) if self._host.profiling else None
        self._thread.ignored += 1
        if recorder is not None:
            recorder.ignore_begin()
        try:
            yield
        finally:
            self._thread.ignored -= 1
            if recorder is not None:
                recorder.ignore_end()
            if span is not None:
                span.__exit__(None, None, None)

    @contextlib.contextmanager
    def replacing(self, operator: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """What runs is a call of `operator`, in the place of the operator that it is in."""
        recorder = self._host.recorder
        if recorder is None or not self.listening:
            yield
            return
        recorder.replace_begin()
        entered = self.enter(operator, named(arguments))
        try:
            yield
        finally:
            if entered:
                self.leave()
            recorder.replace_end()


def _span(name: str) -> Any:
    """Shows a profiler what no dispatcher sees."""
    import torch

    span = torch._C._profiler._RecordFunctionFast(name)
    span.__enter__()
    return span


def contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a tap's methods: a failure is the tap's own; it is noted, the tap is off, and the method answers None."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.on:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.on = False
            self.failed(self.name, error)
            return None

    return call

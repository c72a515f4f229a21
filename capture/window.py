"""The recording window of one engine process, as its adapter sees it: steps that begin, pause, end or fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import orjson

from kcap.capture.lifecycle import POLL, Lifecycle
from kcap.capture.recorder import PHASES
from kcap.capture.steps import StepShape, details

__all__ = ["POLL", "StepShape", "Window"]


def _contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """A failure of `method` is the window's own: it ends the recording, and the method answers False."""

    @functools.wraps(method)
    def call(self: Window, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.failed(error)
            return False

    return call


class Window(Lifecycle):
    """Steers the recorder; whatever fails in it is noted in the shard, switched off, and never reaches the engine."""

    @_contained
    def begin(self, shape: StepShape) -> bool:
        """A step begins on this thread; False when it is not recorded."""
        self.settle()
        if self._shape is not None:
            self.end()
        if not self._admitted() or self.recorder is None or not self._profiled.begin():
            return False
        self._shape = shape
        self.taps.look()
        self.recorder.step_begin(PHASES.index(shape.phase), not self._profiled.running)
        return True

    def _admitted(self) -> bool:
        """Whether the step that begins counts so far; the recorder then listens, and else does not."""
        gate = self._gate
        if gate is None:
            return False
        admitted = gate.begin() and not self._paused
        if admitted != self.open:
            with self._lock:
                self._listen(admitted)
        if self.open and self._first != gate.first:
            self._note_window(gate.first)
        return self.open

    def _note_window(self, first: int) -> None:
        """A window has opened: `first` of the engine's steps, and how many were recorded before."""
        self._first = first
        assert self.recorder is not None
        self.recorder.line(orjson.dumps({"t": "window", "first": first, "recorded": self._steps}))

    @_contained
    def pause(self) -> None:
        if self._shape is not None and self.recorder is not None:
            self.recorder.step_pause()
            self._profiled.pause()

    @_contained
    def resume(self) -> bool:
        if self._shape is None or self.recorder is None or not self.open:
            return False
        self._profiled.resume()
        self.recorder.step_resume()
        return True

    @_contained
    def end(self) -> None:
        """The step that had begun is over: it counts, unless the window was closed meanwhile."""
        shape, self._shape = self._shape, None
        gate, recorder = self._gate, self.recorder
        if shape is None or gate is None or recorder is None:
            return
        if not gate.end():
            self._forget_step()
        elif self._profiled.running:
            self._profiled.end(shape, recorder)
        else:
            recorder.step_end(shape.tokens, len(shape.queries), details(shape, self._steps))
            self._steps += 1
            if self.session.steps is not None and self._steps >= self.session.steps:
                self.close()

    @_contained
    def discard(self) -> None:
        """The step raised: it does not count."""
        if self._shape is not None:
            self._shape = None
            self._forget_step()

    def _forget_step(self) -> None:
        if self.recorder is not None:
            self._profiled.discard()
            self.recorder.step_begin(PHASES.index("other"), False)  # which forgets what was seen of it
            self.recorder.step_pause()

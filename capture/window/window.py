"""The recording window of one engine process: when its recorder listens, and the steps that begin, pause, end or fail.

The recorder listens from the end of the engine's warm-up, or when asked, to a limit or the exit. In between the window
may close and open again (see `kcap.capture.window.gate`).
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.recorder import open_recorder
from kcap.capture.recorder.recorder import Recorder
from kcap.capture.session import GATE_ENDING, PROFILE_ENDING, REGISTERED_ENDING, Session, failure_line
from kcap.capture.taps.all import Taps
from kcap.capture.window.gate import Gate
from kcap.capture.window.process import at_exit_of_child, process_line, rank_facts, replica_of
from kcap.capture.window.profiled import CoolDown, Profile, ProfiledSteps, can_profile
from kcap.capture.window.requests import Requests
from kcap.capture.window.step import Forward, StepShape, step_details
from kcap.schemas.recording.phases import PHASES

__all__ = ["WATCH_POLL", "Forward", "StepShape", "Window"]


WATCH_POLL = 0.2  # seconds between two looks for a request to stop or to pause


class Lifecycle:
    """Opens and closes the recorder of this process. A failure of kcap's own ends the recording, not the engine."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.recorder: Recorder | None = None
        self.open = False
        self.capturing = 0
        self.count_nodes = session.check_coverage
        self.taps = Taps(self, Path(session.directory))
        self.requests = Requests(self._write_line)
        self._reason = ""  # why the recorder is not the native one
        self._begun = self._started = self._loose = self._closed = self._failed = self._paused = False
        self._steps = self._first = 0
        self._unwritten: list[dict[str, str]] = []  # notes
        self._gate: Gate | None = None
        self._profiled = ProfiledSteps(None, self.tap_failed)
        self._shape: StepShape | None = None  # of the step under way
        self._lock = threading.Lock()
        self._undo_at_exit_of_child: Callable[[], None] = lambda: None
        self.inherited = False  # it recorded the process that forked this one, and records nothing here
        _windows.add(self)
        atexit.register(self._exit)  # before what the program registers from now on, which runs earlier

    def loaded(self, **facts: Any) -> None:
        """The model is loaded, its operators are registered, and nothing is compiled or captured yet. `facts`: as in
        `start`. Nothing to do for a recording; what it raises ends the engine's start."""

    def capture(
        self, tables: Callable[[], Sequence[dict[Any, Any]]], original: Callable[[], Any], compares: bool
    ) -> Any:
        """The engine captures its CUDA graphs, by `original`. `tables`: where it keeps them, by what they are for;
        `compares`: it will call `forward`."""
        return original()

    def forward(self, forward: Forward) -> Any:
        """The engine runs a forward, which may be run again."""
        return forward.run()

    @property
    def watches_operators(self) -> bool:
        """Whether each of the engine's operators has to come through the dispatcher now."""
        return self.taps.externals.listening

    def register(self, adapter: str = "") -> None:
        """Tell the session that this process has kcap in it, for which adapter, and put the taps into it."""
        self.session.shard_file(REGISTERED_ENDING).write_text(adapter)
        self.taps.install()

    def start(self, loose: bool = False, **facts: Any) -> None:
        """Open the window (once), or wait until it is asked to open.

        `loose`: what runs outside steps counts, too. `facts`: what the Recording's metadata should know of it.
        """
        if self._begun or self.session.stop_file.exists():
            return
        self._begun, self._loose = True, loose
        try:
            self.taps.install()
            recorder = self._open_recorder()
            if recorder is None:
                return
            recorder.line(process_line(recorder.kind, self._reason, facts))
            self.taps.refresh()
            if self.session.check_coverage and can_profile():
                until = None if self.session.command else self.session.profile_file
                profile = Profile(self.session.shard_file(PROFILE_ENDING), until, CoolDown(lambda: self.capturing > 0))
                self._profiled = ProfiledSteps(profile, self.tap_failed)
            self._open(replica_of({**rank_facts(), **facts}))
        except Exception as error:
            self.failed(error)

    def _open(self, replica: int) -> None:
        """Under the lock: the watching thread may close or pause the window from its first moment on."""
        with self._lock:
            if self._closed:
                return
            self._gate = Gate(self.session.shard_file(GATE_ENDING), replica)
            if self.session.opens:
                self._gate.open(1 + self.session.warmup_steps)
            self._listen(self._gate.admits_next())
            self._started = True

    def _listen(self, wanted: bool) -> None:
        """Under the lock: have the recorder listen or not, unless something keeps it from doing so."""
        recorder = self.recorder
        if self._closed or self._failed or recorder is None:
            return
        wanted = wanted and not recorder.error
        if wanted == self.open:
            return
        self.open = wanted
        recorder.start(self._loose) if wanted else recorder.stop()

    def _open_recorder(self) -> Recorder | None:
        with self._lock:
            if self.recorder is None and not self._failed and not self._closed:
                self.recorder, self._reason = open_recorder(self.session)
                self._undo_at_exit_of_child = at_exit_of_child(self.close)
                threading.Thread(target=self._watch, name="kcap-window", daemon=True).start()
            return self.recorder

    def for_capture(self) -> Recorder | None:
        """The recorder for a graph that is captured, perhaps before the window opens."""
        try:
            self.taps.look()
            return None if self._failed or self._closed else self._open_recorder()
        except Exception as error:
            self.failed(error)
            return None

    def tap_failed(self, tap: str, error: BaseException) -> None:
        """One tap failed, and has switched itself off: noted, the others go on."""
        self._note(failure_line(tap, error))

    def tap_absent(self, tap: str, detail: str) -> None:
        """What a tap looks into was not there."""
        self._note({"t": "tap", "name": tap, "status": "absent", "detail": detail})

    def note(self, text: str) -> None:
        """Something that the Recording should tell, among its notes."""
        self._note({"t": "note", "detail": text})

    def _write_line(self, line: bytes) -> None:
        if self.recorder is not None:
            self.recorder.line(line)

    def _note(self, line: dict[str, str]) -> None:
        try:
            self.session.note(line)
        except OSError:  # the disk may have room again when the shard is closed
            self._unwritten.append(line)

    def failed(self, error: BaseException) -> None:
        """Something of kcap's own failed: stop recording, and leave a note of it."""
        self.open, self._failed, self._shape = False, True, None
        self.tap_failed("window", error)
        if self.recorder is not None:
            self.recorder.stop()
        self.finish_profiling()

    def finish_profiling(self) -> None:
        """The window is over, and the engine goes on: no profiler is left running on this thread."""
        if not self.following:
            self._profiled.finish()

    @property
    def profiling(self) -> bool:
        """Whether the steps run under the profiler, and do not count."""
        return self._profiled.running

    @property
    def following(self) -> bool:
        """Whether steps may still be recorded: the window may be open or not, but is not closed for good."""
        return self._started and not self._closed and not self._failed

    @property
    def recording(self) -> bool:
        """Whether it has a recorder, or is about to, perhaps before the window opens."""
        return (self._begun or self.recorder is not None) and not self._closed and not self._failed

    def _forget(self) -> None:
        """In a forked child: the recorder, its shard, its counters and its profile are the parent's."""
        self.inherited = self.inherited or self.recording
        self._closed = self._closed or self.inherited
        if self.recorder is not None:
            self.recorder.forget()
        self.recorder, self.open, self._shape, self._gate = None, False, None, None
        self._unwritten = []
        self._profiled = ProfiledSteps(None, self.tap_failed)
        self._lock = threading.Lock()
        self.requests = Requests(self._write_line)

    def _watch(self) -> None:
        waiting, paused = threading.Event(), False
        while not self._closed and not waiting.wait(WATCH_POLL):
            if self.session.stop_file.exists():
                self.close()
            elif self._started:
                if self.session.pause_file.exists() != paused:
                    paused = not paused
                    self._set_paused(paused)
                self._look_at_gate()

    def _set_paused(self, paused: bool) -> None:
        with self._lock:
            self._paused = paused
            if paused:
                self._shape = None  # a step that the pause falls into does not count
            self._listen(not paused and self._gate is not None and self._gate.admits_next())

    def _look_at_gate(self) -> None:
        """Follow the gate where calls count outside steps, too, and tell who set it that this process is there."""
        gate = self._gate
        if gate is None:
            return
        asked = gate.asked
        if self._loose:
            with self._lock:
                self._listen(gate.admits_next() and not self._paused)
        gate.answer(asked)

    def _exit(self) -> None:
        if self.recorder is not None:  # else there is nothing to close, as in a forked child
            self.close()

    def close(self) -> None:
        """Close the window for good, and the shard; whatever is written later goes nowhere."""
        with self._lock:
            self._profiled.finish()
            if self._closed:
                return
            self.open, self._closed = False, True
            gate, self._gate = self._gate, None
            if gate is not None:
                gate.remove()
            if self._started and self.recorder is not None:
                for line in self.taps.lines():
                    self.recorder.line(line)
                self.requests.close()
            self.taps.uninstall()
            if self.recorder is not None:
                for note in self._unwritten:
                    self.recorder.line(orjson.dumps(note))
                self.recorder.close()
            atexit.unregister(self._exit)
            self._undo_at_exit_of_child()


_windows: weakref.WeakSet[Lifecycle] = weakref.WeakSet()  # of this process


def _forget_windows() -> None:
    for window in list(_windows):
        window._forget()


os.register_at_fork(after_in_child=_forget_windows)


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
    """Steers the recorder; whatever fails in it is noted in the shard, switched off, and never reaches the engine.

    `current`: the window of this process for the adapter that was given this one. It is another after a fork, and None
    once another engine has taken the process.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.current: Callable[[], Window | None] = lambda: self

    @_contained
    def begin(self, shape: StepShape) -> bool:
        """A step begins on this thread; False when it is not recorded."""
        self.finish_profiling()
        if self._shape is not None:
            self.end()
        if not self._admitted() or self.recorder is None or not self._profiled.begin():
            return False
        self._shape = shape
        self.taps.look()
        profiled = self._profiled
        self.recorder.step_begin(PHASES.index(shape.phase), not profiled.running, profiled.slot_of(shape))
        return True

    def _admitted(self) -> bool:
        """Whether the step that begins counts so far; the recorder then listens, and else does not."""
        gate, recorder = self._gate, self.recorder
        if gate is None or recorder is None:
            return False
        admitted = gate.begin() and not self._paused and not recorder.error
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
            compared = self._profiled.slot_of(shape) >= 0
            details = step_details(shape, self._steps, self.requests.numbers, compared)
            recorder.step_end(shape.tokens, len(shape.queries), details)
            if recorder.error:
                return
            if compared:
                self._profiled.counted(shape)
            if shape.requests:
                self.requests.add(shape, self._steps)
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

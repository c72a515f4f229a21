"""The recording window of one engine process: opened after the warm-up, closed by a limit, a request or the exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.config import Session
from kcap.capture.process import process_line
from kcap.capture.profiled import ENDING, Profile
from kcap.capture.recorder import PHASES, Recorder, open_recorder
from kcap.capture.taps.all import Taps

MAX_STEP_LINES = 20_000
POLL = 0.2  # seconds between two looks for a request to stop or to pause
MAX_LISTED = 512  # sequences whose lengths a step's line lists


@dataclass
class StepShape:
    """What an engine knows of a step before it runs: the phase, each sequence's new tokens and context after.

    `cached`: what each sequence found in a prefix cache, where the engine says so and any did.
    """

    phase: str
    queries: list[int]
    lengths: list[int]
    cached: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.queries)


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


class Window:
    """Steers the recorder; whatever fails in it is noted in the shard, switched off, and never reaches the engine."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.recorder: Recorder | None = None
        self.open = False
        self.capturing = 0
        self.count_nodes = session.check_coverage
        self.taps = Taps(self, Path(session.directory))
        self._reason = ""  # why the recorder is not the native one
        self._begun = self._started = self._loose = self._closed = self._failed = False
        self._steps = 0
        self._profile: Profile | None = None
        self._shape: StepShape | None = None
        self._lock = threading.Lock()

    def register(self) -> None:
        """Tell the session that this process has kcap in it, and put the taps into it."""
        self._file(".registered").touch(mode=0o600)
        self.taps.install()

    def start(self, loose: bool = False, **facts: Any) -> None:
        """Open the window (once). `facts`: what the Recording's metadata should know of this process."""
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
            if self.session.check_coverage:
                self._profile = Profile(self._file(ENDING), None if self.session.command else self.session.profile_file)
            self._open(recorder)
        except Exception as error:
            self.failed(error)

    def _open(self, recorder: Recorder) -> None:
        """Under the lock: the watching thread may close or pause the window from its first moment on."""
        with self._lock:
            if not self._closed:
                recorder.start(self._loose)
                self.open = self._started = True

    def _open_recorder(self) -> Recorder | None:
        with self._lock:
            if self.recorder is None and not self._failed and not self._closed:
                self.recorder, self._reason = open_recorder(self.session)
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self._forget)
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
        line = {"t": "tap", "name": tap, "status": "failed", "detail": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError), self._file(".notes").open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")

    def failed(self, error: BaseException) -> None:
        """Something of kcap's own failed: stop recording, and leave a note of it."""
        self.open, self._failed, self._shape = False, True, None
        self.tap_failed("window", error)
        if self.recorder is not None:
            self.recorder.stop()
        self.settle()

    def settle(self) -> None:
        """The window is over, and the engine goes on: no profiler is left running on this thread."""
        if self._profile is not None and not self.following:
            self._finish()

    @property
    def profiling(self) -> bool:
        """Whether the steps run under the profiler, and do not count."""
        return self._profile is not None

    @property
    def following(self) -> bool:
        """Whether steps may still be recorded: the window was opened and, though it may pause, not closed."""
        return self._started and not self._closed and not self._failed

    def _file(self, ending: str) -> Path:
        stem = self.session.shard()
        return stem.with_name(stem.name + ending)  # a host's name may have dots

    def _forget(self) -> None:
        """In a forked child: the recorder, its shard and its counters are the parent's."""
        self.recorder, self.open, self._closed, self._shape = None, False, True, None
        self._lock = threading.Lock()

    def _watch(self) -> None:
        waiting = threading.Event()
        while not self._closed and not waiting.wait(POLL):
            if self.session.stop_file.exists():
                self.close()
            elif self._started and self.session.pause_file.exists() == self.open:
                self._set_paused(self.open)

    def _set_paused(self, paused: bool) -> None:
        with self._lock:
            if self._closed or self._failed or self.recorder is None or self.recorder.error:
                return
            self.open, self._shape = not paused, None  # a step that the pause falls into does not count
            self.recorder.stop() if paused else self.recorder.start(self._loose)

    def close(self) -> None:
        with self._lock:
            self._finish()
            if self._closed:
                return
            self.open, self._closed = False, True
            if self._started and self.recorder is not None:
                for line in self.taps.lines():
                    self.recorder.line(line)
            self.taps.uninstall()
            if self.recorder is not None:
                self.recorder.close()

    def _finish(self) -> None:
        """Write what was profiled, on the thread that ran it: where that is another, at its next step or its exit."""
        profile = self._profile
        if profile is None or profile.elsewhere:
            return
        self._profile = None
        try:
            profile.finish()
        except Exception as error:
            self.tap_failed("coverage", error)

    @_contained
    def begin(self, shape: StepShape) -> bool:
        """A step begins on this thread; False when it is not recorded."""
        self.settle()
        if not self.open or self.recorder is None:
            return False
        self.end()
        if self._profile is not None and not self._profiles():
            return False
        self._shape = shape
        self.taps.look()
        self.recorder.step_begin(PHASES.index(shape.phase), self._profile is None)
        return True

    def _profiles(self) -> bool:
        """Whether the step that begins is to be recorded, profiled or not."""
        profile = self._profile
        assert profile is not None
        if profile.over:
            self._finish()
            return True
        try:
            return profile.begin()
        except Exception as error:
            profile.give_up()
            self.tap_failed("coverage", error)
            return False

    @_contained
    def pause(self) -> None:
        if self._shape is not None and self.recorder is not None:
            self.recorder.step_pause()
            if self._profile is not None:
                self._profile.pause()

    @_contained
    def resume(self) -> bool:
        if self._shape is None or self.recorder is None or not self.open:
            return False
        if self._profile is not None:
            self._profile.resume()
        self.recorder.step_resume()
        return True

    @_contained
    def end(self) -> None:
        """The step that had begun is over: it counts."""
        shape, self._shape = self._shape, None
        if shape is None or self.recorder is None:
            return
        if self._profile is not None:
            return self._end_profiled(shape, self._profile, self.recorder)
        self.recorder.step_end(shape.tokens, len(shape.queries), self._details(shape))
        self._steps += 1
        if self.session.steps is not None and self._steps >= self.session.steps:
            self.close()

    def _end_profiled(self, shape: StepShape, profile: Profile, recorder: Recorder) -> None:
        program, index = recorder.step_program(), profile.end()
        if program >= 0:
            known = {"index": index, "program": program, "phase": PHASES.index(shape.phase)}
            size = {"tokens": shape.tokens, "sequences": len(shape.queries)}
            recorder.line(orjson.dumps({"t": "profiled", **known, **size, **_listed(shape)}))

    @_contained
    def discard(self) -> None:
        """The step raised: it does not count."""
        if self._shape is not None and self.recorder is not None:
            self._shape = None
            if self._profile is not None:
                self._profile.end()
            self.recorder.step_begin(PHASES.index("other"), False)  # which forgets what was seen of it
            self.recorder.step_pause()

    def _details(self, shape: StepShape) -> bytes:
        # Past the limit the lines thin out by halves, so that the sample stays spread over the whole run.
        every = 1 << max(0, (self._steps // MAX_STEP_LINES).bit_length())
        if self._steps % every:
            return b""
        return b"," + orjson.dumps(_listed(shape))[1:-1]


def _listed(shape: StepShape) -> dict[str, list[int]]:
    cached = {"cached": shape.cached[:MAX_LISTED]} if shape.cached else {}
    return {"lengths": shape.lengths[:MAX_LISTED], "queries": shape.queries[:MAX_LISTED], **cached}

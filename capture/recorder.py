"""The recorder of a process: what a tap feeds and an engine adapter steers."""

from __future__ import annotations

from typing import Protocol

from kcap.capture.config import Session

PHASES = ("prefill", "decode", "mixed", "other")


class Recorder(Protocol):
    """Interns calls into the process's shard and counts them; `kind` names it in the Recording.

    Opened with `loose`, every thread's calls count at once. Otherwise a step's calls count together when it ends, so
    that a process killed in a step leaves the steps before it, whole.
    """

    kind: str

    @property
    def error(self) -> str: ...
    def start(self, loose: bool) -> None: ...
    def stop(self) -> None: ...
    def set_phase(self, phase: int) -> None: ...
    def step_begin(self, phase: int) -> None: ...
    def step_pause(self) -> None: ...
    def step_resume(self) -> None: ...
    def step_end(self, tokens: int, sequences: int, details: bytes) -> None: ...
    def line(self, text: bytes) -> None: ...
    def close(self) -> None: ...


def open_recorder(session: Session) -> tuple[Recorder, str]:
    """The recorder that works here, and why it is not the native one ("" if it is)."""
    from kcap.capture.taps.dispatch_mode import DispatchModeRecorder
    from kcap.capture.taps.dispatcher import NativeRecorder, Unavailable

    if session.fail == "load":
        raise RuntimeError("made to fail")
    fail_after = int(session.fail) if session.fail else -1
    reason = "asked for"
    if session.recorder in ("auto", "native"):
        try:
            return NativeRecorder(session.shard(), session.keep_tokens, fail_after), ""
        except (Unavailable, OSError) as error:
            if session.recorder == "native":
                raise
            reason = str(error)
    return DispatchModeRecorder(session.shard(), session.keep_tokens, fail_after), reason

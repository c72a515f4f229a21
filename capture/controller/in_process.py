"""`kcap.record()`: record a part of any PyTorch program, on the same recorder as an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.window.window import StepShape, Window
from kcap.errors import CallError, KcapError
from kcap.schemas.recording.phases import PHASES
from kcap.system.output import check_output, describe_leftover, make_directory_beside, publish

_recording: int | None = None  # the process that records: a forked child does not


class Recorder:
    """The open recording that `with kcap.record(...) as recorder` gives."""

    def __init__(self, window: Window) -> None:
        self._window = window

    @contextmanager
    def step(
        self, phase: str = "other", queries: list[int] | None = None, lengths: list[int] | None = None
    ) -> Iterator[None]:
        """Bracket one step of this thread, so that its calls make a Program.

        phase: prefill, decode, mixed or other. queries, lengths: each sequence's new tokens, and its context after.
        """
        if phase not in PHASES:
            raise CallError(f"unknown phase {phase}: one of {', '.join(PHASES)}")
        began = self._window.begin(StepShape(phase, queries or [], lengths or []))
        try:
            yield
        except BaseException:
            self._window.discard()
            raise
        if began:
            self._window.end()


@contextmanager
def record(
    output: str | os.PathLike[str], *, model: str | None = None, keep_tokens: bool = False, force: bool = False,
    recorder: str = "auto",
) -> Iterator[Recorder]:  # fmt: skip
    """Record every operator call that this program makes inside the block, on all its threads, into `output`.

    model: a name for the Recording. keep_tokens: keep the values of integer tensors. recorder: auto, native or
    python. The Recording is written when the block ends, also by an exception. CallError if `output` exists and
    `force` is not set, or if this process records already.
    """
    global _recording
    path = Path(output)
    if _recording == os.getpid():
        raise CallError("this process records already: close that recording first")
    check_output(path, force, "force=True")
    directory = make_directory_beside(path)
    session = Session(
        str(directory / "shards"), model=model, keep_tokens=keep_tokens, recorder=recorder, command=sys.argv
    )
    session.write()
    window = Window(session)
    window.start(loose=True)
    _recording = os.getpid()
    try:
        yield Recorder(window)
    finally:
        if _recording == os.getpid():
            _recording = None
            window.close()
            _finish(session, directory, path, force)


def _finish(session: Session, directory: Path, path: Path, force: bool) -> None:
    try:
        fold_session(session, directory)
        publish(directory, path, force)
    except (OSError, KcapError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise KcapError(f"{reason}: {describe_leftover(directory, path)}") from error

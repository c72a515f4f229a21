"""`kcap.record()`: record a part of any PyTorch program, on the same recorder as an engine."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from kcap.capture.controller.window_control import marked_running, refuse_written, running_process
from kcap.capture.engines.pytorch import marks
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import RECORDERS, SESSION_VARIABLE, Session, read_session
from kcap.capture.window.window import StepShape, Window
from kcap.errors import CallError, KcapError
from kcap.system.output import check_output, describe_leftover, make_directory_beside, publish

_outputs: dict[int, Path] = {}  # by process, for a forked child does not record: what it is recorded into


class Recorder:
    """The open recording that `with kcap.record(...) as recorder` gives."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._lock = threading.Lock()  # held through a step

    def step(
        self, phase: str = "other", queries: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """Bracket one step of this thread, so that its calls make a Program. `kcap.step()` does the same.

        phase: prefill, decode, mixed or other. queries, lengths: each sequence's new tokens, and its context after.
        CallError where there can be no such step. Inside another step it is part of that; beside another thread's, its
        calls are in none.
        """
        return self.mark(marks.marked_shape(phase, *(() if given is None else given for given in (queries, lengths))))

    @contextmanager
    def mark(self, shape: StepShape) -> Iterator[None]:
        """As `step` does, one of this shape: what `kcap.step()` calls."""
        if not self._lock.acquire(blocking=False):
            yield
            return
        began = False
        try:
            began = self._window.begin(shape)
            yield
        finally:
            if began:
                self._window.end()
            self._lock.release()


@contextmanager
def record(
    output: str | os.PathLike[str], *, model: str | None = None, keep_tokens: bool = False, force: bool = False,
    recorder: str = "auto",
) -> Iterator[Recorder]:  # fmt: skip
    """Record every operator call that this program makes inside the block, on all its threads, into `output`.

    model: a name for the Recording. keep_tokens: keep the values of integer tensors. recorder: auto, native or
    python. The Recording is written when the block ends, also by an exception. CallError if `output` exists and
    `force` is not set, or is being written, or if this process is recorded already, or if `model` is no text or
    `recorder` is unknown.
    """
    path, process = Path(os.path.abspath(output)), os.getpid()
    if recorder not in RECORDERS:
        raise CallError(f"recorder {recorder!r}: one of {', '.join(RECORDERS)}")
    if not (model is None or is_text(model)):
        raise CallError(f"model {model!r}: a name, as text")
    _refuse_under_kcap_record()
    recorded_into = _outputs.setdefault(process, path)  # in one step, whatever other threads do
    if recorded_into is not path:
        raise CallError(f"this process is recorded already, into {recorded_into}: close that recording first")
    try:
        check_output(path, force, "force=True")
        refuse_written(path)
        directory = make_directory_beside(path)
        session = Session(
            str(directory / "shards"),
            model=model,
            output=str(path),
            keep_tokens=keep_tokens,
            recorder=recorder,
            command=sys.argv,
        )
        try:
            session.write()
        except CallError:
            shutil.rmtree(directory)
            raise
        with marked_running(session):
            window = Window(session)
            window.start(loose=True)
            before, marks.steps = marks.steps, (steps := Recorder(window))
            try:
                yield steps
            finally:
                marks.steps = before
                if os.getpid() == process:
                    window.close()
                    _finish(session, directory, path, force)
    finally:
        if os.getpid() == process:
            del _outputs[process]


def is_text(value: object) -> bool:
    """Whether a file of UTF-8 can hold it."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _refuse_under_kcap_record() -> None:
    """CallError where this process is one of a `kcap record -- COMMAND`: a call can be counted once only."""
    with suppress(KeyError, OSError, ValueError):
        session = read_session(os.environ[SESSION_VARIABLE])
        raise CallError(
            f"kcap record (process {running_process(session)}) records this program already, into {session.output}: "
            "leave out kcap.record(), or run the program without kcap record"
        )


def _finish(session: Session, directory: Path, path: Path, force: bool) -> None:
    try:
        fold_session(session, directory)
        publish(directory, path, force)
    except (OSError, KcapError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise KcapError(f"{reason}: {describe_leftover(directory, path)}") from error

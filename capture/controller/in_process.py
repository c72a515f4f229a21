"""`kcap.record()`: record a part of any PyTorch program, on the same recorder as an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kcap.capture.controller.window_control import marked_running, refuse_written, running_process
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import SESSION_VARIABLE, Session, read_session
from kcap.capture.window.window import StepShape, Window
from kcap.errors import CallError, KcapError
from kcap.schemas.recording.phases import PHASES
from kcap.system.output import check_output, describe_leftover, make_directory_beside, publish

_outputs: dict[int, Path] = {}  # by process, for a forked child does not record: what it is recorded into


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
        finally:
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
    `force` is not set, or is being written, or if this process is recorded already.
    """
    path, process = Path(os.path.abspath(output)), os.getpid()
    _refuse_under_kcap_record()
    recorded_into = _outputs.setdefault(process, path)  # in one step, whatever other threads do
    if recorded_into is not path:
        raise CallError(f"this process is recorded already, into {recorded_into}: close that recording first")
    try:
        check_output(path, force, "force=True")
        refuse_written(path)
        directory = make_directory_beside(path)
        session = Session(
            str(directory / "shards"), model=model, keep_tokens=keep_tokens, recorder=recorder, command=sys.argv
        )
        session.write()
        with marked_running(session):
            window = Window(session)
            window.start(loose=True)
            try:
                yield Recorder(window)
            finally:
                if os.getpid() == process:
                    window.close()
                    _finish(session, directory, path, force)
    finally:
        if os.getpid() == process:
            del _outputs[process]


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

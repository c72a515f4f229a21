"""Follows what is recorded to its end, and makes the Recording of what its processes left."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import orjson

from kcap.capture import launch, plugins, windows
from kcap.capture.child import ENDINGS, Noted, how_it_ended, last_lines, status_text
from kcap.capture.config import Session
from kcap.capture.merge import merge
from kcap.capture.output import Place
from kcap.errors import KcapError
from kcap.schemas.recording import Recording


def follow(command_line: list[str], session: Session, place: Place, log: Path | None) -> tuple[Recording, str]:
    """Run `command_line` under `session`, and merge into `place`; the Recording, and what failed (or "").

    `log`: where its output goes, if not kcap's.
    """
    with attending(session, place.noted) as at:
        prepare_recorder(session)
        status = launch.run(command_line, session, at, log)
        at.over()
        failure = _failure(session, status, log)
        return finish(session, place.directory, status, log, failure), failure


def _failure(session: Session, status: int | None, log: Path | None) -> str:
    """What a status other than 0 says of how the engine, or a user's command, ended by itself."""
    if not status:
        return ""
    return f"the {'command' if session.command else 'engine'} ended with {how_it_ended(status, log)}"


def finish(session: Session, directory: Path, status: int | None, log: Path | None, failure: str) -> Recording:
    """The Recording of a session whose engine has ended with `status` (None where kcap ended it), in `directory`.

    `failure`: what failed; the Recording has its first line.
    """
    if not launch.registered(session):
        explain_silence(session, status, log)
    _note(session, failure)
    recording = merge(session, directory)
    nothing = not recording.calls and not any(tap.status == "failed" for tap in recording.metadata.taps)
    if nothing and status and log:
        said = how_it_ended(status, log)
        shutil.rmtree(directory)
        raise KcapError(f"the engine ended before its first step, with {said}")
    return recording


def _note(session: Session, failure: str) -> None:
    """Only the first line is for the Recording: the output may hold secrets."""
    if failure:
        line = {"t": "note", "detail": failure.splitlines()[0].rstrip(":")}
        (Path(session.directory) / "failure.notes").write_bytes(orjson.dumps(line) + b"\n")


@contextmanager
def attending(session: Session, noted: ExitStack) -> Iterator[launch.At]:
    """What shows how far the work is, and heeds the signals to kcap, none of which ends it until `noted` ends."""
    asked = noted.enter_context(Noted(signal.SIGUSR1, signal.SIGUSR2))
    ending = noted.enter_context(Noted(*ENDINGS))
    with windows.running(session), ExitStack() as shown:
        report = shown.enter_context(progress())

        def attend(text: str) -> None:
            report(text)
            for number in asked.take():
                _steer(session, number == signal.SIGUSR1)

        yield launch.At(attend, ending, shown.close)


def _steer(session: Session, opened: bool) -> None:
    try:
        answer = windows.start(session) if opened else windows.stop(session)
        click.echo(f"kcap: {windows.said(answer, opened)}", err=True)
    except KcapError as error:
        click.echo(f"kcap: {error}", err=True)


def prepare_recorder(session: Session) -> None:
    """Build the native recorder before the engine starts; a failure is the engine processes' own to report."""
    from kcap.capture.native_build import Unavailable
    from kcap.capture.taps.dispatcher import build

    if session.recorder == "python":
        return
    try:
        build()
    except (Unavailable, ImportError) as error:
        click.echo(f"kcap: {error}", err=True)


def explain_silence(session: Session, status: int | None, log: Path | None) -> None:
    """KcapError: why no process of an engine had kcap in it. `status`: of its end; None where kcap ended it."""
    if status and log:
        raise KcapError(f"the engine did not start ({status_text(status)}):\n{last_lines(log, status)}")
    excluded = plugins.excluded(None if session.command else session.framework)
    if excluded:
        raise KcapError(f"no process of the engine had kcap in it: {excluded} leaves it out; add kcap to it")
    where = session.command[0] if session.command else sys.executable
    ended = "" if status is None else f" ({status_text(status)})"
    raise KcapError(
        f"no process of the engine had kcap in it{ended}: is {shlex.quote(where)} the engine, and is kcap "
        f"installed in its environment? Engines that load it: {plugins.loading()}"
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What shows how far the work is, where somebody looks at it."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting the engine") as status:
        yield status.update

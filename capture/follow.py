"""Follows what is recorded to its end, and makes the Recording of what its processes left."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kcap.capture import launch, plugins
from kcap.capture.config import Session
from kcap.capture.merge import discard, merge
from kcap.errors import KcapError
from kcap.schemas.recording import Recording


def follow(command_line: list[str], session: Session, directory: Path, log: Path | None) -> Recording:
    """Run `command_line` under `session`, and merge into `directory`. `log`: where its output goes, if not kcap's."""
    prepare_recorder(session)
    with progress() as report:
        status = launch.run(command_line, session, report, log)
    if not launch.registered(session):
        explain_silence(session, status, log)
    recording = merge(session, directory)
    said = f"{status}:\n{launch.last_lines(log)}" if status and log else ""
    discard(session)
    if said and not recording.calls and not any(tap.status == "failed" for tap in recording.metadata.taps):
        raise KcapError(f"the engine ended before its first step, with status {said}")
    if said:
        click.echo(f"kcap: the engine ended with status {said}", err=True)
    return recording


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


def explain_silence(session: Session, status: int, log: Path | None) -> None:
    """KcapError: why no process of an engine that ended with `status` had kcap in it."""
    if status and log:
        raise KcapError(f"the engine did not start (status {status}):\n{launch.last_lines(log)}")
    excluded = plugins.excluded(None if session.command else session.framework)
    if excluded:
        raise KcapError(f"no process of the engine had kcap in it: {excluded} leaves it out; add kcap to it")
    where = session.command[0] if session.command else sys.executable
    raise KcapError(
        f"no process of the engine had kcap in it (status {status}): is {shlex.quote(where)} the engine, and is kcap "
        "installed in its environment?"
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

"""Starts what is recorded, follows it, and stops it so that its processes can close their shards."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kcap.capture import windows
from kcap.capture.child import Child, Noted
from kcap.capture.config import SESSION_VARIABLE, Session
from kcap.capture.engines import of_framework
from kcap.capture.shards import all_closed, progress
from kcap.errors import KcapError

CLOSE_PATIENCE, POLL = 10.0, 0.2  # seconds
STARTUP = Path(__file__).resolve().with_name("startup")  # what Python runs first there


@dataclass(frozen=True)
class At:
    """`attend`: called several times a second, with what is being done; `over`: once it is done.

    `ending`: whether a signal asked to end it.
    """

    attend: Callable[[str], None]
    ending: Noted
    over: Callable[[], None]


def environment(session: Session) -> dict[str, str]:
    """The environment of a recorded process: it names the session. A user's own command looks at STARTUP first."""
    env = dict(os.environ)
    env[SESSION_VARIABLE] = str(session.file.resolve())
    if session.command:
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP), env.get("PYTHONPATH")]))}
    engine = of_framework(session.framework)
    return {**engine.FRAMEWORK.environment, **env} if engine else env


def run(command: list[str], session: Session, at: At, log: Path | None = None) -> int | None:
    """Run `command` to its end under `session`; its exit status, None where kcap ended it.

    Ctrl-C stops it once its shards are closed.

    `log`: as in Child.
    """
    if at.ending:
        raise KcapError("ended before the engine was started")
    child = Child(command, environment(session), log)
    while child.status is None and not at.ending:
        at.attend(status(session))
        time.sleep(POLL)
    ended = child.status
    if ended is None:
        at.attend("closing the Recording")
    end(child, session)
    return ended


def end(child: Child, session: Session) -> None:
    """End what runs, or what one that has ended left behind, once its windows are closed."""
    close(session)
    child.end()


def close(session: Session) -> None:
    """Close every process's window after the same step, and its shard."""
    with contextlib.suppress(KcapError):  # it has closed for good
        windows.stop(session)
    windows.catch_up(session)
    close_window(session)


def status(session: Session) -> str:
    processes, steps = progress(Path(session.directory))
    if not processes:
        return "starting the engine"
    return f"recording: {steps} steps" if session.opens else f"the window is closed, {steps} steps recorded"


def close_window(session: Session) -> None:
    """Ask every process to close its shard; returns when those that live have, or after CLOSE_PATIENCE."""
    session.stop_file.touch(mode=0o600)
    deadline = time.monotonic() + CLOSE_PATIENCE
    while not all_closed(Path(session.directory), windows.is_gone) and time.monotonic() < deadline:
        time.sleep(0.05)


def registered(session: Session) -> bool:
    """Whether any process of the engine had kcap in it."""
    return any(Path(session.directory).glob("*.registered"))

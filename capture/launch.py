"""Starts what is recorded, follows it, and stops it so that its processes can close their shards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kcap.capture.config import SESSION_VARIABLE, Session
from kcap.capture.engines import of_framework
from kcap.capture.shards import all_closed, progress
from kcap.errors import KcapError

Report = Callable[[str], None]
CLOSE_PATIENCE, END_PATIENCE = 10.0, 60.0  # seconds
LAST_LINES = 8
STANDARD_ERROR = 2
ERROR = re.compile(r"\b(?:[A-Za-z_.]+(?:Error|Exception)): .+")
STARTUP = Path(__file__).resolve().with_name("startup")  # what Python runs first there


def environment(session: Session) -> dict[str, str]:
    """The environment of a recorded process: it names the session. A user's own command looks at STARTUP first."""
    env = dict(os.environ)
    env[SESSION_VARIABLE] = str(session.file.resolve())
    if session.command:
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP), env.get("PYTHONPATH")]))}
    engine = of_framework(session.framework)
    return {**engine.FRAMEWORK.environment, **env} if engine else env


def run(command: list[str], session: Session, report: Report, log: Path | None = None, cwd: Path | None = None) -> int:
    """Run `command` to its end under `session`; its exit status. Ctrl-C stops it once its shards are closed.

    `log`: where its output goes (kcap's own standard error where None).
    """
    sink: IO[bytes] | None = log.open("wb") if log else None
    try:
        child = subprocess.Popen(
            command, env=environment(session), stdout=sink or STANDARD_ERROR, stderr=sink or STANDARD_ERROR,
            stdin=subprocess.DEVNULL, start_new_session=True, cwd=cwd,
        )  # fmt: skip
    except OSError as error:
        raise KcapError(f"cannot start {command[0]}: {error.strerror}") from None
    finally:
        if sink:
            sink.close()
    with _Signals() as signals:
        while child.poll() is None and not signals.came:
            report(_status(session))
            time.sleep(0.2)
        if signals.came and child.poll() is None:
            report("closing the Recording")
            close_window(session)
            _end(child)
    return child.returncode


class _Signals:
    """Notes SIGINT and SIGTERM instead of raising, so that the child is stopped in order."""

    def __enter__(self) -> _Signals:
        self.came = False
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: object) -> None:
        self.came = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _status(session: Session) -> str:
    processes, steps = progress(Path(session.directory))
    return f"recording: {steps} steps" if processes else "starting the engine"


def close_window(session: Session) -> None:
    """Ask every process to close its shard; returns when they have, or after CLOSE_PATIENCE."""
    session.stop_file.touch(mode=0o600)
    deadline = time.monotonic() + CLOSE_PATIENCE
    while not all_closed(Path(session.directory)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGINT, END_PATIENCE), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def last_lines(log: Path) -> str:
    """What an engine's output says of its end: the errors that it named, or else its last lines."""
    with log.open("rb") as file:
        lines = [line.decode(errors="replace").rstrip() for line in file]
    errors = [match.group() for line in lines if (match := ERROR.search(line))]
    named = list(dict.fromkeys(errors))[:5]
    return "\n".join(f"  {line}" for line in named or lines[-LAST_LINES:])


def registered(session: Session) -> bool:
    """Whether any process of the engine had kcap in it."""
    return any(Path(session.directory).glob("*.registered"))

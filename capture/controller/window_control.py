"""Opens and closes the window of a recording that runs: from another shell, at a signal, around a client.

All processes of a replica get the same first and last step: their gates are held while both are chosen, so that no step
is counted on one rank alone (see `kcap.capture.window.gate`).
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kcap.capture.session import GATE_ENDING, Session, read_session
from kcap.capture.shards.counts import all_closed, is_alive, shard_process, steps_so_far
from kcap.capture.window.gate import (
    ANSWERED,
    ASKED,
    BEGUN,
    ENDED,
    EVER,
    FROM,
    HELD,
    REPLICA,
    UNTIL,
    open_cells,
)
from kcap.errors import CallError, KcapError
from kcap.system.output import recover_command

PATIENCE = 2.0  # seconds until a process that has not answered is reported as silent


CATCH_UP, IDLE = 10.0, 1.0  # seconds that a rank in mid-step is waited for at most, and one that begins none


@dataclass(frozen=True)
class Answer:
    """`changed`: the window was not so already. `processes`: how many follow. `silent`: those that do not answer."""

    changed: bool
    processes: int = 0
    silent: list[int] = field(default_factory=list)


@contextmanager
def marked_running(session: Session) -> Iterator[None]:
    """While it lasts, `find_session` finds the recording, and nobody else writes its output."""
    with _running_file(Path(session.directory)).open("wb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"%d" % os.getpid())
        yield


def running_process(session: Session) -> str:
    """The number of the process that marked the session as running."""
    return _running_file(Path(session.directory)).read_text()


def refuse_written(output: Path) -> None:
    """CallError where a recording that runs on this machine will write `output`."""
    for session in _running_sessions(output):
        with suppress(FileNotFoundError):  # it has been published, or given up, since
            process = running_process(session)
            raise CallError(f"{output} is being written by process {process}: end it, or choose another output")


def _running_sessions(output: Path) -> list[Session]:
    sessions = []
    for directory in _working_directories(Path(os.path.abspath(output))):
        with suppress(FileNotFoundError):
            if _is_running(_running_file(directory / "shards")):
                sessions.append(read_session(directory / "shards" / "session.json"))
    return sessions


def _running_file(shards: Path) -> Path:
    return shards / "running"


def find_session(output: Path) -> Session:
    """The session of the `kcap record` that will write `output`; KcapError where none runs."""
    path = Path(os.path.abspath(output))
    for session in _running_sessions(output):
        return session
    directories = [directory for directory in _working_directories(path) if (directory / "shards").is_dir()]
    why = f"no kcap record -o {output} runs on this machine"
    if (path / "recording.json").is_file():
        raise KcapError(f"{why}: {output} is a Recording already, whose window has closed")
    if directories:
        raise KcapError(f"{why}: one was interrupted, see {recover_command(directories[0], output)}")
    raise KcapError(f"{why}: start it first, with the same -o")


def _working_directories(output: Path) -> Iterator[Path]:
    """The working directories for an output, as `kcap record` names them; those of `run` are none of `run.2`."""
    for directory in output.parent.glob(f".{glob.escape(output.name)}.*"):
        if "." not in directory.name.removeprefix(f".{output.name}."):
            yield directory


def _is_running(mark: Path) -> bool:
    try:
        with mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:  # a child that was forked may hold it after its parent's end
        process = mark.read_text()
        return not process or is_alive(int(process))
    return False


def open_window(session: Session) -> Answer:
    """Open the window: a step counts if it begins from now on, less the session's warm-up steps."""
    return _set_window(session, True)


def close_window(session: Session) -> Answer:
    """Close the window: a step that has not ended by now does not count."""
    return _set_window(session, False)


def _set_window(session: Session, opened: bool) -> Answer:
    with (Path(session.directory) / "window.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_over(session):
            raise KcapError("the window has closed for good: --max-steps were recorded, or the engine has ended")
        if session.opens == opened:
            return Answer(False)
        session.window_file.write_text("open" if opened else "closed")  # for processes that start later
        gates = _gates(session)
        with _hold(list(gates.values())) as asked:
            for replica in {cells[REPLICA] for cells in gates.values()}:
                mine = [cells for cells in gates.values() if cells[REPLICA] == replica]
                _open_gates(mine, session.warmup_steps) if opened else _close_gates(mine)
        return _await_answers(gates, asked)


def _is_over(session: Session) -> bool:
    """Not yet where all processes so far have ended: a command may start its engine after others."""
    directory = Path(session.directory)
    enough = session.steps is not None and steps_so_far(directory)[1] >= session.steps
    return session.stop_file.exists() or (enough and all_closed(directory))


def _gates(session: Session) -> dict[int, memoryview]:
    """The gate of each process of this machine that lives, by its id; of what it ran before `exec` none is left."""
    gates = {}
    for path in Path(session.directory).glob(f"*{GATE_ENDING}"):
        host, process = shard_process(path)
        if host == socket.gethostname() and is_alive(process):
            with suppress(OSError, ValueError):  # it has just ended, or just begins
                gates[process] = open_cells(path)
    return gates


@contextmanager
def _hold(gates: list[memoryview]) -> Iterator[int]:
    """While it lasts (well under a millisecond), a step that begins or ends waits. Gives the number of this request."""
    asked = 1 + max((cells[ASKED] for cells in gates), default=0)
    for cells in gates:
        cells[HELD] = 1
    try:
        yield asked
    finally:
        for cells in gates:
            cells[ASKED] = asked
            cells[HELD] = 0


def _open_gates(gates: list[memoryview], warmup_steps: int) -> None:
    first = 1 + warmup_steps + max(cells[BEGUN] for cells in gates)
    for cells in gates:
        cells[FROM] = first
        cells[UNTIL] = EVER


def _close_gates(gates: list[memoryview]) -> None:
    last = max(cells[ENDED] for cells in gates)
    for cells in gates:
        cells[UNTIL] = last + 1


def catch_up(session: Session) -> None:
    """After `stop`: return when the ranks behind have ended the window's last step, or CATCH_UP or IDLE is over."""
    deadline, seen, moved = time.monotonic() + CATCH_UP, -1, 0.0
    while behind := [cells for cells in _gates(session).values() if cells[ENDED] + 1 < cells[UNTIL] < EVER]:
        now, ended = time.monotonic(), sum(cells[ENDED] for cells in behind)
        if ended != seen:
            seen, moved = ended, now
        in_step = any(cells[BEGUN] > cells[ENDED] for cells in behind)
        if now > (deadline if in_step else min(deadline, moved + IDLE)):
            return
        time.sleep(0.02)


def _await_answers(gates: dict[int, memoryview], asked: int) -> Answer:
    deadline = time.monotonic() + PATIENCE
    while silent := [process for process, cells in gates.items() if cells[ANSWERED] < asked]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    silent = [process for process in silent if is_alive(process)]
    return Answer(True, len(gates) - len(silent), silent)


def answer_text(answer: Answer, opened: bool) -> str:
    """An answer in words."""
    state = "open" if opened else "closed"
    if not answer.changed:
        return f"the window is {state} already"
    if not answer.processes and not answer.silent:
        return f"the window will be {state} when the engine is up: no process records now"
    all_of_them = answer.processes + len(answer.silent)
    silent = f"; no answer from {', '.join(map(str, answer.silent))} (stopped, or stuck?)" if answer.silent else ""
    return f"the window is {state}: {answer.processes} of {all_of_them} processes follow{silent}"

"""What came of a process: found and ended, however it was forked. Needed where no pid namespace ends it all at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S, PAUSE_S = 10.0, 0.0005
SHORT = 4096  # bytes


def kill_all(find: Callable[[], list[int]]) -> bool:
    """Kill what `find` gives until it gives nothing, and reap what is ours; False if it goes on for 10 s."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := find():
        kill_each(pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def kill_descendants() -> None:
    """Kill all that came of this process, to which their orphans come, until the kernel says that none is left."""
    while True:
        kill_each(descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(PAUSE_S)


def kill_each(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The living processes below `pid`, parents first, and its own dead children, which are to be reaped."""
    return [each for each in below(pid) if alive(each) or pid == os.getpid()]


def below(pid: int) -> list[int]:
    """All processes below `pid`, parents first, whatever state they are in."""
    return [each for child in children(pid) for each in (child, *below(child))]


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`, dead ones that nobody has reaped among them."""
    try:
        tasks = [Path(task.path, "children").read_text() for task in os.scandir(f"/proc/{pid}/task")]
    except OSError:
        return _children_by_scan(pid)
    return [int(child) for text in tasks for child in text.split()]


DEAD, STILL = "ZX", "TtZX"  # states of a thread, as proc(5) has them


def alive(pid: int) -> bool:
    """Whether a thread of `pid` is: where the first one has ended, the process looks dead and is not."""
    return any(state not in DEAD for state in _thread_states(pid))


def still(pid: int) -> bool:
    """Whether every thread of `pid` is stopped or has ended, and as far as the kernel tells has left its processor."""
    return all(state in STILL for state in _thread_states(pid)) and RUNNING not in map(_system_call, _threads(pid))


def tells_who_runs(pid: int) -> bool:
    """Whether the kernel tells of the threads of `pid` that they run; hardened ones do not."""
    return None not in map(_system_call, _threads(pid))


def _thread_states(pid: int) -> list[str]:
    """Of those that are there. A thread's name, which it may choose, is read as bytes."""
    states = [_state(thread)[0] for thread in _threads(pid)]
    return [state for state in states if state]


def _threads(pid: int) -> list[str]:
    """By their paths below /proc."""
    try:
        return [f"{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


RUNNING = b"running\n"


def _system_call(thread: str) -> bytes | None:
    """What the kernel says of it; None where it does not.

    A thread may be preempted when its state says already that it is stopped: the rest of its way, after which it leaves
    its processor, comes later. The kernel's answer waits for that (`wait_task_inactive`, in kernel/sched/core.c).
    """
    try:
        return _read(f"/proc/{thread}/syscall")
    except (ProcessLookupError, FileNotFoundError):
        return b""
    except OSError:
        return None


def confined(pid: int) -> bool:
    """Whether `pid` has given up new privileges, which no process can undo."""
    try:
        return b"NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def _children_by_scan(parent: int) -> list[int]:
    """The same from every process's parent, for kernels that do not list children."""
    numbers = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [pid for pid in numbers if _state(pid)[1] == parent]


def _state(pid: int | str) -> tuple[str, int]:
    try:
        state, parent = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 2)[:2]
    except (OSError, ValueError):  # it is gone
        return "", 0
    return state.decode(), int(parent)


def _read(path: str) -> bytes:
    """A short file of the kernel's, which gives it in one piece. Keepers ask while the judge waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, SHORT)
    finally:
        os.close(descriptor)

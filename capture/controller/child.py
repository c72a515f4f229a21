"""A process that kcap runs and ends, and the signals that kcap itself is sent meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from kcap.capture.controller import watchdog
from kcap.capture.controller.terminal import Terminal
from kcap.errors import KcapError
from kcap.system.standard_error import write_nowhere

LAST_LINES, LAST_ERRORS = 8, 5
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILL_SEQUENCE = (
    (signal.SIGINT, 60.0, 1.5),
    (signal.SIGTERM, 10.0, 0.7),
    (signal.SIGKILL, 10.0, 0.5),
)  # seconds until the next is sent: usually, and in a hurry
LEFT_IN_A_HURRY = 0.5  # seconds that what is left of a group has then
POLL = 0.02
ERROR = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception)(?:: .+|$)")
NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|\w+Warning)\b")  # what such a line names did not end the process
TRACEBACK = "Traceback (most recent call last)"
LONGEST_LINE = 600  # characters of one that is told
DETAILS = 3  # lines that an error may go on for


class Child:
    """Runs `command` in a process group of its own, which ends with kcap, however that ends.

    `log`: where its output goes, and it reads nothing, in a session of its own; where None it has kcap's own standard
    streams and, once it reads from it, the terminal. Only its owner reads a log: an engine writes secrets, too.
    """

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path | None = None) -> None:
        sink = os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") if log else None
        self._guard = _Guard()
        try:
            self._process = subprocess.Popen(
                command, env=env, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL if log else None,
                start_new_session=log is not None, process_group=None if log else 0,
                preexec_fn=self._guard.watch_this,  # it takes no lock that another thread may hold
            )  # fmt: skip
        except OSError as error:
            self._guard.end()
            raise KcapError(f"cannot start {command[0]}: {error.strerror}") from None
        finally:
            if sink:
                sink.close()
        self._log, self._shown, self._in_line = log, 0, False
        self._terminal = None if log else Terminal()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def follow_stop(self) -> None:
        """Lend it the terminal that it was stopped for, or stop with it; call this several times a second."""
        if self._terminal is not None and self.status is None:
            self._terminal.follow_stop(self._process.pid)

    def show(self) -> None:
        """Copy what it has written to its log since to kcap's standard error."""
        if self._log is not None:
            ended = self.status is not None
            with self._log.open("rb") as file:
                file.seek(self._shown)
                text = file.read()
            self._shown += len(text)
            if text:
                self._in_line = not text.endswith(b"\n")
            if ended and self._in_line:
                text, self._in_line = text + b"\n", False
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()

    def how_it_ended(self) -> str:
        return ending_text(self.status or 0, self._log)

    def last_lines(self) -> str:
        return last_lines(self._log, self.status or 0) if self._log else ""

    def end(self, in_a_hurry: Callable[[], bool] = lambda: False) -> int:
        """End it by harder and harder signals to its group, and then what it left of that; its exit status.

        `in_a_hurry`: whether all of it must be over within seconds, also what has a session of its own (compilers do).
        """
        if self._terminal is not None and self.status is None:
            self._terminal.lend(self._process.pid)  # it may ask whether to end; a second Ctrl-C is its own
        started = watchdog.descendants(self._process.pid)
        for number, patience, least in KILL_SEQUENCE:
            if self.status is not None:
                break
            began = time.monotonic()
            if number == signal.SIGKILL:
                watchdog.kill_group(self._process.pid, least, started if in_a_hurry() else frozenset())
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            while self.status is None and time.monotonic() - began < (least if in_a_hurry() else patience):
                time.sleep(POLL)
        if in_a_hurry():
            watchdog.end_group(self._process.pid, LEFT_IN_A_HURRY, started)
        else:
            watchdog.end_group(self._process.pid)
        self._guard.end()
        if self._terminal is not None:
            self._terminal.take_back(self._process.pid)
            self._terminal.close()
        status = self.status
        return -signal.SIGKILL if status is None else status  # killed, and still held by the machine


class _Guard:
    """A process that outlives kcap by as long as it takes to end a group of processes: they might hold a GPU."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self._pipe = os.fdopen(write, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(watchdog.__file__)], stdin=read, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
            )  # fmt: skip
        finally:
            os.close(read)

    def watch_this(self) -> None:
        """Runs in the child, so that its group is guarded from the first moment on."""
        self._pipe.write(b"%d" % os.getpid())

    def end(self) -> None:
        """Once nothing is left to be guarded."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def status_text(status: int) -> str:
    """An exit status in words, with the signal that it stands for."""
    name = signal.Signals(-status).name if -status in set(signal.Signals) else ""
    return f"status {status} ({name})" if name else f"status {status}"


def ending_text(status: int, log: Path | None) -> str:
    """Its exit status, and where its output went to `log`, what that says of its end."""
    return f"{status_text(status)}:\n{last_lines(log, status)}" if log else status_text(status)


def last_lines(log: Path, status: int) -> str:
    """What a process's output says of its end: the last errors that it named, or else its last lines.

    One that a signal ended (a negative `status`) named no error for it.
    """
    with log.open("rb") as file:
        lines = [line.decode(errors="replace").rstrip() for line in file]
    errors = {}  # where each was named last
    for number, line in enumerate(lines):
        if (match := ERROR.search(line)) and not NO_ERROR.search(line[: match.start()]):
            errors[match.group()] = (number, match.start())
    ends = sorted(errors.items(), key=lambda error: error[1])[-LAST_ERRORS:] if status >= 0 else []
    named = [line for text, (number, column) in ends for line in (text, *_details(lines[number + 1 :], column))]
    return "\n".join(f"  {_cut(line)}" for line in named or [*filter(None, lines)][-LAST_LINES:] or ["(none)"])


def _cut(line: str) -> str:
    """Some errors list every model that their engine knows."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} … ({len(line):,} characters)"


def _details(lines: list[str], column: int) -> list[str]:
    """The lines that an error goes on for, from `column`: indented ones, each with its heading (as pydantic's)."""
    texts = [line[column:] for line in takewhile(lambda line: TRACEBACK not in line, lines[:DETAILS])]
    while texts and not texts[-1].startswith(" "):
        texts.pop()
    return texts if all(text and not NO_ERROR.search(text) for text in texts) else []


class SignalLog:
    """While it lasts these signals are noted, and do nothing else; SIGHUP goes on to be ignored if it was (nohup).

    `raised`: an error that a signal raises at once, where nothing is to be ended in order. `answer`: what is said
    of one that ends nothing.
    """

    raised: BaseException | None = None
    answer = ""

    def __init__(self, *numbers: signal.Signals) -> None:
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._numbers = [number for number in numbers if number not in ignored]
        self._signals: list[int] = []

    def __enter__(self) -> SignalLog:
        self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def _note(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if number == signal.SIGHUP:
            _drop_terminal()
        if self.answer:
            with contextlib.suppress(OSError):
                os.write(STANDARD_ERROR, f"kcap: {self.answer}\n".encode())  # print may be under way
        if self.raised is not None:
            raise self.raised

    def __bool__(self) -> bool:
        """Whether any came."""
        return bool(self._signals)

    @property
    def name(self) -> str:
        """Of the first one."""
        name = signal.Signals(self._signals[0]).name
        return "Ctrl-C" if name == "SIGINT" else name

    @property
    def insists(self) -> bool:
        """Whether it was asked for twice; a terminal that is closed may say it more than once."""
        return len(self._signals) > 1 and any(number != signal.SIGHUP for number in self._signals[1:])

    def take(self) -> list[int]:
        """The signals since the last call."""
        signals, self._signals = self._signals, []
        return signals

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _drop_terminal() -> None:
    """Write to nowhere instead of to a terminal that is gone: an error of that would cost the Recording."""
    for output in (STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.write(output, b"")
        except OSError:
            write_nowhere(output)

"""kcap's terminal, lent to the program that it runs: prompts, pagers and /dev/tty work as they do without kcap."""

from __future__ import annotations

import contextlib
import os
import signal

ASKS_FOR_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)
STOPS = (*ASKS_FOR_TERMINAL, signal.SIGTSTP)


class Terminal:
    """The controlling terminal, if kcap has one. A group of processes gets it once it reads from it.

    Until then Ctrl-C is kcap's, which closes the windows of all ranks after the same step; from then on it is the
    program's, as is Ctrl-Z.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)

    def follow_stop(self, group: int) -> None:
        """Where the first process of `group` was stopped by the terminal: lend it, or stop with it (Ctrl-Z)."""
        if self._file is None:
            return
        stop = None
        with contextlib.suppress(ChildProcessError):  # it has ended
            stop = os.waitid(os.P_PID, group, os.WSTOPPED | os.WNOHANG)
        if stop is None or stop.si_status not in STOPS:
            return
        with contextlib.suppress(OSError):  # the terminal, or the program, is gone
            in_front = os.tcgetpgrp(self._file)
            if stop.si_status in ASKS_FOR_TERMINAL and in_front in (os.getpgrp(), group):
                self.lend(group)
            else:
                self.take_back(group)
                os.killpg(os.getpgrp(), stop.si_status)  # stops here until kcap is continued
                os.killpg(group, signal.SIGCONT)

    def lend(self, group: int) -> None:
        self._pass_on(os.getpgrp(), group)
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGCONT)

    def take_back(self, group: int) -> None:
        self._pass_on(group, os.getpgrp())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _pass_on(self, owner: int, group: int) -> None:
        """Make `group` the foreground one, if `owner` is. Whoever is in the background would be stopped for it."""
        if self._file is None:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(self._file) == owner:
                    os.tcsetpgrp(self._file, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

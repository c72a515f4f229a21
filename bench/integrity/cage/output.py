"""What a candidate prints: passed on to the log up to a limit, read to the end, so that it never waits for a reader."""

from __future__ import annotations

import contextlib
import os
import select
import signal

CHUNK = 1 << 16


class Output:
    """A pipe read in the keeper, which meanwhile hears of its children's ends and of the request to end."""

    def __init__(self, reading: int, log: int, limit: int) -> None:
        self.reading = reading
        self.log = log
        self.left = limit
        self.asked_to_end = False
        self._open = True
        os.set_blocking(reading, False)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Output:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in (self.reading, self._woken, self._wake):
            os.close(descriptor)

    def wait(self, timeout: float | None) -> None:
        """Until something was printed, a child ended, the end was asked for, or `timeout` seconds have passed."""
        ready, _, _ = select.select([self._woken, *([self.reading] if self._open else [])], [], [], timeout)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, CHUNK)
        if self.reading in ready:
            self._pass_on()

    def drain(self) -> None:
        """All that is in the pipe by now."""
        while self._pass_on():
            pass

    def _pass_on(self) -> bool:
        """Whether there was anything."""
        try:
            part = os.read(self.reading, CHUNK)
        except BlockingIOError:
            return False
        self._open = bool(part)
        kept, self.left = part[: self.left], max(self.left - len(part), 0)
        with contextlib.suppress(OSError):
            os.write(self.log, kept)
        return self._open

    def _end(self, *_: object) -> None:
        self.asked_to_end = True

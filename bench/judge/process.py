"""A candidate's process seen from the judge: what is asked of it, what it answers, and how it ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcap.bench.judge import wire
from kcap.bench.judge.failures import Ended, Spoke, TooSlow
from kcap.bench.judge.forking import ForkServer
from kcap.bench.judge.limits import Limits
from kcap.bench.judge.processors import used
from kcap.bench.judge.wire import Answer

TOLD = 2000  # characters of what it printed


@dataclass
class Process:
    """One process. `confined`: what keeps it in its place."""

    server: ForkServer
    limits: Limits
    pid: int
    channel: socket.socket
    folder: Path
    log: Any
    confined: list[str]
    spent: float = field(default=0.0, kw_only=True)  # seconds, since a Workload was opened
    how: str | None = field(default=None, kw_only=True)  # it ended
    last_words: str = field(default="", kw_only=True)  # the end of what it had printed by then

    def ask(
        self, content: bytes, descriptors: Sequence[int] = (), at_once: Callable[[], object] = lambda: None
    ) -> Answer:
        """Its answer; Ended, Spoke or TooSlow where there is none. `at_once` is called as soon as there is one."""
        nonce = secrets.token_bytes(wire.NONCE)
        if self._spoke():
            raise self._silenced()
        looked = time.perf_counter_ns()
        before = used(self.pid)
        began = time.perf_counter_ns()
        try:
            socket.send_fds(self.channel, [nonce, content], list(descriptors))
        except OSError:
            raise Ended(self.end(keep=True, gone=True)) from None
        answer = self.receive(max(self.limits.timeout - self.spent, 0.01))
        elapsed = time.perf_counter_ns() - began
        at_once()
        self.spent += elapsed / 1e9
        after = used(self.pid)
        span = time.perf_counter_ns() - looked  # it goes on working when it has answered: unmaps what it was handed
        try:
            return wire.answered(answer, nonce, elapsed, after.cpu(before) / span)
        except ValueError:
            raise self._silenced() from None

    def receive(self, timeout: float) -> bytes:
        """One message of its; Ended or TooSlow where there is none."""
        self.channel.settimeout(timeout)
        try:
            content = self.channel.recv(wire.LONGEST)
        except TimeoutError:
            self.end(keep=True)
            raise TooSlow(f"took longer than {self.limits.timeout:g} s ({self.limits.option})") from None
        except OSError:
            content = b""
        if not content:
            raise Ended(self.end(keep=True, gone=True))
        return content

    def _spoke(self) -> bool:
        """Whether something that it said waits to be read: a process that is gone says nothing."""
        self.channel.setblocking(False)
        with contextlib.suppress(OSError):
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        return False

    def _silenced(self) -> Spoke:
        self.end(keep=True)
        return Spoke("it spoke to the judge itself")

    def printed(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), TOLD, max(size - TOLD, 0)).decode(errors="replace").replace("\0", "")

    def end(self, keep: bool = False, gone: bool = False) -> str:
        """End it and all that it started; how it ended. OSError where the machine lacks what that takes.

        `keep`: what it built, for the next process of its code; `gone`: it closed its end, and so ends by itself.
        """
        self._close()
        try:
            ended = str(self.server.ask({"end": self.pid, "keep": keep, "gone": gone})["how"])
        finally:
            if not keep:
                remove(self.folder)
        self.how = self.how or ended
        return self.how

    def _close(self) -> None:
        """Close what is open of it here: once, whatever becomes of the process."""
        if self.log.closed:
            return
        try:
            self.forget()
            self.last_words = self.printed()
        finally:
            self.channel.close()
            self.log.close()

    def forget(self) -> None:
        """Let go of the Workload that is open, if one is."""


def remove(folder: Path) -> None:
    """As far as that goes: one that is empty, as most are, where no file can be opened either."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    shutil.rmtree(folder, ignore_errors=True)

"""A candidate's process seen from the judge: what it gets, how it is asked, by whose clock, and how it ends.

It is forked by the fork server, which alone can start and end it. It runs only while it is asked for something: from
then until its keeper says that all of its sandbox stands still (kcap.bench.sandbox.keeper).
"""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.device import Gpu
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.messages import Ended, EndRequest, Refusal, Started, StartRequest
from kcap.bench.sandbox import keeper
from kcap.errors import KcapError
from kcap.system.redact import SECRET_NAME


@dataclass(frozen=True)
class Limits:
    """What a candidate gets. Bytes, and seconds: `timeout` for all that it is asked on one Workload, by the user's
    `option`. `memory` None: what is there. `device`: as torch calls it there.
    """

    device: str
    threads: int
    cores: tuple[int, ...]
    timeout: float
    build_timeout: float
    memory: int | None
    disk: int
    processes: int
    scratch: Path
    hidden: tuple[Path, ...] = ()
    gpu: Gpu | None = None
    gpu_memory: GpuMemory | None = None
    option: str = "--timeout"


POISON = "CUDA error"  # after one, a process can run nothing more on the GPU


class ProcessEnded(Exception):
    """The process ended while it was asked for something; the message says how."""


class Stirred(ProcessEnded):
    """It did what no driver does, and was ended: something of its sandbox ran while it had been stopped, or it answers
    without having read what it was asked.
    """


class TooSlow(Exception):
    """It did not answer in time, and was ended."""


class NotBuilt(Exception):
    """It could not be built; `log` has the compiler's words."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


MOST_PRINTED = 2000  # characters of what it printed
PRINTING_S = 0.5  # until that has arrived


@dataclass(frozen=True)
class Done:
    """What a process says came of a message, and the judge's own clock: nanoseconds from when it was let run until all
    of its sandbox had been told to stop, and the CPU time that any of it had until it stood still.
    """

    report: protocol.Report
    elapsed_ns: int


@dataclass
class Process:
    """One process. `channel`: what it is sent; `control`: to its keeper; `memory`: the descriptor of what it reports.
    `confined`: what keeps it in its place.
    """

    server: ForkServer
    limits: Limits
    pid: int
    channel: socket.socket
    control: socket.socket
    memory: int
    folder: Path
    log: Any
    confined: list[str]
    spent: float = field(default=0.0, kw_only=True)  # seconds, since a Workload was opened,
    compiled: float = field(default=0.0, kw_only=True)  # and of its first run, which are not in `spent`
    how: str | None = field(default=None, kw_only=True)  # it ended
    last_words: str = field(default="", kw_only=True)  # the end of what it had printed by then

    def ask(
        self,
        content: bytes,
        descriptors: Sequence[int] = (),
        compiling: bool = False,
        told: Callable[[], object] | None = None,
    ) -> Done:
        """Let it do what `content` says; ProcessEnded, Stirred or TooSlow where that comes to no end.

        `compiling`: it may take as long as a build, which is not counted in its time on the Workload. `told` is called
        as soon as all of its sandbox has been told to stop.
        """
        os.pwrite(self.memory, protocol.REPORT.pack(protocol.UNREPORTED, 0, 0, 0), 0)
        try:
            given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self.channel.sendmsg([content], given, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.end(keep=True)
            raise Stirred("it leaves what the judge asks unread") from None
        except OSError:
            raise ProcessEnded(self.end(keep=True, gone=True)) from None
        limits = self.limits
        left = limits.build_timeout - self.compiled if compiling else limits.timeout - self.spent
        self.control.settimeout(max(left, 0.01))
        elapsed = self._let_run(compiling, told)
        if compiling:
            self.compiled += elapsed / 1e9
        else:
            self.spent += elapsed / 1e9
        report = self.report()
        if report.code == protocol.UNREPORTED:
            raise ProcessEnded(f"it stopped itself: {self.end(keep=True)}")
        return Done(report, elapsed)

    def _let_run(self, compiling: bool, told: Callable[[], object] | None) -> int:
        """Nanoseconds that it ran, by its keeper's clock."""
        said = self._ask_keeper(keeper.TELL if told else keeper.RUN, compiling)
        if told and said == keeper.TOLD:
            told()
            said = self._ask_keeper(b"", compiling)
        if said == keeper.STIRRED:
            self.end(keep=True)
            raise Stirred("it went on working when it had been stopped")
        if len(said) != keeper.RAN.size:
            raise ProcessEnded(self.end(keep=True, gone=True))
        return int(keeper.RAN.unpack(said)[1])

    def _ask_keeper(self, command: bytes, compiling: bool) -> bytes:
        """What it says next, after `command` if that is one; nothing, where it is gone."""
        try:
            if command:
                self.control.send(command)
            return self.control.recv(16)
        except TimeoutError:
            self.end(keep=True)
            limits = self.limits
            longest = limits.build_timeout if compiling else limits.timeout
            option = "--build-timeout" if compiling else limits.option
            raise TooSlow(f"took longer than {longest:g} s ({option})") from None
        except OSError:
            return b""

    def report(self) -> protocol.Report:
        """What it says came of the last message."""
        return protocol.read_report(os.pread(self.memory, protocol.REPORT.size + protocol.MOST_TEXT, 0))

    def built(self) -> bytes:
        """What it says of how it was built; TooSlow where it says nothing in time."""
        self.control.settimeout(self.limits.build_timeout)
        try:
            self.control.recv(16)
        except TimeoutError:
            self.end(keep=True)
            raise TooSlow(f"was not built within {self.limits.build_timeout:g} s (--build-timeout)") from None
        return os.pread(self.memory, protocol.REPORT_BYTES, 0).partition(b"\0")[0]

    def printed(self, something: bool = False) -> str:
        """The end of what it printed. `something`: it has, which may still be on its way through the supervisor."""
        size, until = os.fstat(self.log.fileno()).st_size, time.monotonic() + PRINTING_S
        while something and time.monotonic() < until:
            time.sleep(PRINTING_S / 50)
            before, size = size, os.fstat(self.log.fileno()).st_size
            if size and size == before:
                break
        return (
            os.pread(self.log.fileno(), MOST_PRINTED, max(size - MOST_PRINTED, 0))
            .decode(errors="replace")
            .replace("\0", "")
        )

    def end(self, keep: bool = False, gone: bool = False) -> str:
        """End it and all that it started; how it ended. OSError where the machine lacks what that takes.

        `keep`: what it built, for the next process of its code; `gone`: it closed its end, and so ends by itself.
        """
        self._close()
        try:
            ended = self.server.end({"end": self.pid, "keep": keep, "gone": gone})["how"]
        finally:
            if not keep:
                remove_folder(self.folder)
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
            self.control.close()
            os.close(self.memory)
            self.log.close()

    def forget(self) -> None:
        """Let go of the Workload that is open, if one is."""


def remove_folder(folder: Path) -> None:
    """As far as that goes: one that is empty, as most are, where no file can be opened either."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


FORK_SERVER = "kcap.bench.judge.fork_server"
FORK_SERVER_GONE = "the fork server is gone"
START_LIMIT_S = 300.0  # importing torch, and compiling the driver at its first use
ANSWER_LIMIT_S = 60.0


GPU_SETTINGS = frozenset(
    {
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
    }
)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are none of a Solution's business left out: API keys, tokens, passwords; and GPU_SETTINGS:
    ways to allocate that take no memory of the driver's, and to launch that wait where others must run on.
    """
    return {
        name: value for name, value in environment.items() if name not in GPU_SETTINGS and not SECRET_NAME.search(name)
    }


class ForkServerGone(Exception):
    """The fork server is dead, and no candidate can be started or ended any more: a judge ends with it."""


class ForkServer:
    """One process that candidates are forked from; used by one thread at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", FORK_SERVER]
            env = {**inherited(os.environ), **environment}
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=env)
        self._channel.settimeout(START_LIMIT_S)
        try:
            self._answer()
        except ForkServerGone as gone:
            self.close()
            raise KcapError(f"the fork server does not start: {gone}") from None
        self._channel.settimeout(ANSWER_LIMIT_S)

    def start(self, request: StartRequest, descriptors: Sequence[int]) -> Started:
        """Start a candidate, which gets `descriptors`; raises as `_ask`."""
        return cast(Started, self._ask(request, descriptors))

    def end(self, request: EndRequest) -> Ended:
        """End a candidate; raises as `_ask`."""
        return cast(Ended, self._ask(request))

    def _ask(self, request: StartRequest | EndRequest, descriptors: Sequence[int] = ()) -> Started | Ended:
        """Its answer to one request. KcapError where it could not do it, OSError where its machine lacks what that
        takes, ForkServerGone if it has died.
        """
        with self._lock:
            try:
                socket.send_fds(self._channel, [orjson.dumps(request)], list(descriptors))
            except OSError as error:
                raise ForkServerGone(f"{FORK_SERVER_GONE}: {error}") from None
            return self._answer()

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Started | Ended:
        try:
            content = self._channel.recv(1 << 16)
        except (TimeoutError, ConnectionError):
            content = b""
        if not content:
            raise ForkServerGone(f"{FORK_SERVER_GONE}: see its message on standard error")
        answer: Started | Ended | Refusal = orjson.loads(content)
        if "lack" in answer:
            raise OSError(answer["lack"])
        if "error" in answer:
            raise KcapError(answer["error"])
        return cast(Started | Ended, answer)

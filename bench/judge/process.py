"""A candidate's process seen from the judge: what it gets, what is asked of it, the CPU time it takes, and how it ends.

It is forked by the fork server, which alone can start and end it. Its CPU time is the kernel's account, not its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
from kcap.bench.judge.driver.protocol import Answer
from kcap.bench.judge.messages import Ended, EndRequest, Refusal, Started, StartRequest
from kcap.bench.sandbox.process_tree import descendants
from kcap.errors import KcapError
from kcap.system.open_files import ensure_free_descriptors
from kcap.system.redact import SECRET_NAME


@dataclass(frozen=True)
class Limits:
    """What a candidate gets. Bytes, and seconds: `timeout` for all that it is asked on one Workload, by the user's
    `option`. `memory` None: what is there.
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
    option: str = "--timeout"


POISON = "CUDA error"  # after one, a process can run nothing more on the GPU


class ProcessEnded(Exception):
    """The process ended while it was asked for something; the message says how."""


class SpokeUnasked(ProcessEnded):
    """It said what it was not asked for, or before it was asked, and was ended."""


class TooSlow(Exception):
    """It did not answer in time, and was ended."""


class NotBuilt(Exception):
    """It could not be built; `log` has the compiler's words."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


MOST_PRINTED = 2000  # characters of what it printed


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
        """Its answer; ProcessEnded, SpokeUnasked or TooSlow where there is none. `at_once` is called when it comes."""
        nonce = secrets.token_bytes(protocol.NONCE)
        if self._spoke():
            raise self._silenced()
        looked = time.perf_counter_ns()
        before = cpu_time_of(self.pid)
        began = time.perf_counter_ns()
        try:
            socket.send_fds(self.channel, [nonce, content], list(descriptors))
        except OSError:
            raise ProcessEnded(self.end(keep=True, gone=True)) from None
        answer = self.receive(max(self.limits.timeout - self.spent, 0.01))
        elapsed = time.perf_counter_ns() - began
        at_once()
        self.spent += elapsed / 1e9
        after = cpu_time_of(self.pid)
        span = time.perf_counter_ns() - looked  # it goes on working when it has answered: unmaps what it was handed
        try:
            return protocol.read_answer(answer, nonce, elapsed, after.cpu(before) / span)
        except ValueError:
            raise self._silenced() from None

    def receive(self, timeout: float) -> bytes:
        """One message of its; ProcessEnded or TooSlow where there is none."""
        self.channel.settimeout(timeout)
        try:
            content = self.channel.recv(protocol.LONGEST)
        except TimeoutError:
            self.end(keep=True)
            raise TooSlow(f"took longer than {self.limits.timeout:g} s ({self.limits.option})") from None
        except OSError:
            content = b""
        if not content:
            raise ProcessEnded(self.end(keep=True, gone=True))
        return content

    def _spoke(self) -> bool:
        """Whether something that it said waits to be read: a process that is gone says nothing."""
        self.channel.setblocking(False)
        with contextlib.suppress(OSError):
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        return False

    def _silenced(self) -> SpokeUnasked:
        self.end(keep=True)
        return SpokeUnasked("it spoke to the judge itself")

    def printed(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self.log.fileno()).st_size
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


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are none of a Solution's business left out: API keys, tokens, passwords."""
    return {name: value for name, value in environment.items() if not SECRET_NAME.search(name)}


class ForkServerGone(Exception):
    """The fork server is dead, and no candidate can be started or ended any more: a judge ends with it."""


class ForkServer:
    """One process that candidates are forked from; used by one thread at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", FORK_SERVER]
            env = {**without_secrets(os.environ), **environment}
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


STAT = Path("/proc/stat")
PROC_FILES = 2  # of /proc that are open at a time
CPU_CLOCK = 2  # CPUCLOCK_SCHED, linux/posix-timers.h: all threads of a process, in nanoseconds


@dataclass(frozen=True)
class CpuTime:
    """Nanoseconds of CPU time so far: of the process's first thread, and of all else in its sandbox (`company`)."""

    own: int
    company: int

    def cpu(self, before: CpuTime) -> int:
        """What the sandbox has had since `before`."""
        return max(self.own - before.own, 0) + max(self.company - before.company, 0)


@dataclass(frozen=True)
class MachineCpuTime:
    """Nanoseconds so far: of the clock, of all processors at work or taken by the host, and of the sandboxes named with
    this process.
    """

    clock: int
    busy: int
    ours: int

    @classmethod
    def now(cls, *pids: int) -> MachineCpuTime:
        """`pids`: of the sandboxes' candidates."""
        times = [cpu_time_of(pid) for pid in pids]
        ours = time.process_time_ns() + sum(cpu.own + cpu.company for cpu in times)
        return cls(time.monotonic_ns(), _busy_ns(), ours)

    def others(self, before: MachineCpuTime) -> float:
        """How many processors everybody else had since `before`."""
        taken = self.busy - before.busy - (self.ours - before.ours)
        return max(taken, 0) / max(self.clock - before.clock, 1)


def cpu_time_of(pid: int) -> CpuTime:
    """What the sandbox of process `pid` used; zeros where Linux does not tell, OSError where no file can be opened."""
    ensure_free_descriptors(PROC_FILES)
    own = _first_thread_ns(pid)
    return CpuTime(own, max(sum(_process_cpu_ns(process) for process in _sandboxed(pid)) - own, 0))


def _first_thread_ns(pid: int) -> int:
    """The first field of a schedstat file (proc(5))."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def _busy_ns() -> int:
    """All of the first line of /proc/stat but idle and iowait (proc(5)); 0 where Linux does not tell."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    except (OSError, ValueError):
        return 0
    return (user + nice + system + irq + softirq + steal) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _sandboxed(pid: int) -> list[int]:
    """All that lives under its parent, which keeps one candidate."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return []
    return descendants(parent) if parent else [pid]


def _process_cpu_ns(pid: int) -> int:
    """By the clock of another process: clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime_ns((~pid << 3) | CPU_CLOCK)
    except OSError:
        return 0

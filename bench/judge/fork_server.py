"""The process that candidates are forked from: `python -m kcap.bench.judge.fork_server`.

It has torch and the driver loaded, has never touched CUDA, and runs no code from elsewhere itself. The judge speaks to
it on a socket, its standard input: a JSON object a packet, with the descriptors that the candidate gets. Each candidate
is in a sandbox: started, ended and forgotten here.

Its malloc, and so its candidates', keeps memory as a server's allocator does, which gives none back. glibc gives large
blocks back to the kernel when they are freed, or not, by a threshold that it moves as it goes. Then one process faults
its pages in again at each call, another in none, and who frees an output between two calls pays for it there: times
would tell of that.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import select
import socket
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import torch  # noqa: F401  here, so that no candidate has to

from kcap.bench.judge.driver import driver
from kcap.bench.judge.driver.candidate_process import CandidateOrder, run_candidate
from kcap.bench.judge.driver.driver import Driver
from kcap.bench.judge.messages import Ended, EndRequest, Refusal, SandboxLimits, Started, StartRequest
from kcap.bench.sandbox import SandboxedProcess, SandboxSpec, open_sandbox
from kcap.errors import KcapError
from kcap.system.open_files import ensure_free_descriptors

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1


def disable_malloc_trim() -> None:
    """For this process and those that it forks, where the C library has such settings."""
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(M_TRIM_THRESHOLD, NEVER)
        setting(M_MMAP_MAX, 0)


PASSED_DESCRIPTORS = 5  # that come with a request to start: channel, report, control, log, and what is ordered
FILES_TO_START = 12  # open at a time to start a sandbox, two of them then to end it: pipes, namespaces, cgroup, /proc
GONE_S = 5.0  # until a process that closed its channel has ended


@dataclass
class Sandboxes:
    """`running`: by their candidates' process ids, until their scratch is given up, too. `owed`: those whose end could
    not be seen to, which comes before the next start.
    """

    loaded: Driver
    running: dict[int, SandboxedProcess] = field(default_factory=dict)
    owed: set[int] = field(default_factory=set)

    def answer(self, request: StartRequest | EndRequest, descriptors: list[int]) -> Started | Ended | Refusal:
        """What came of one request; `lack`, where the machine has too little of what it takes, or another `error`."""
        try:
            if "end" in request:
                return {"how": self._end(request["end"], request["gone"], request["keep"])}
            return self._start(request, descriptors)
        except OSError as error:
            return {"lack": str(error)}
        except KcapError as error:
            return {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """End them all."""
        for candidate in self.running.values():
            with contextlib.suppress(OSError):
                candidate.end()

    def _start(self, request: StartRequest, descriptors: list[int]) -> Started:
        if len(descriptors) != PASSED_DESCRIPTORS:  # the kernel leaves out those for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for pid in list(self.owed):
            self._end(pid)
        ensure_free_descriptors(FILES_TO_START)
        channel, report, control, log, written = descriptors
        order = CandidateOrder.from_json(orjson.loads(os.pread(written, os.fstat(written).st_size, 0)))
        spec, earlier = _sandbox_spec(request["sandbox"], (channel, report), control), request["after"]
        after = self.running.pop(earlier, None) if earlier is not None else None
        try:
            candidate = open_sandbox(spec, log, lambda: run_candidate(order, channel, report, self.loaded), after=after)
        finally:
            if after is not None:
                after.end()
        self._forget()
        self.running[candidate.pid] = candidate
        return {"pid": candidate.pid, "confined": candidate.confined}

    def _forget(self) -> None:
        for pid, candidate in list(self.running.items()):
            if candidate.how is not None and candidate.spaces is None:
                del self.running[pid]

    def _end(self, pid: int, gone: bool = False, keep: bool = False) -> str:
        """How it ended. `gone`: by itself, so that it is only waited for."""
        candidate = self.running.get(pid)
        if candidate is None:
            return "it had ended"
        self.owed.add(pid)
        if gone and candidate.how is None:
            select.select([candidate], [], [], GONE_S)
            candidate.poll()
        how = str(candidate.end(keep_scratch=keep))
        self.owed.remove(pid)
        return how


def _sandbox_spec(limits: SandboxLimits, keep: tuple[int, ...], control: int) -> SandboxSpec:
    return SandboxSpec(
        folder=Path(limits["folder"]),
        memory=limits["memory"],
        disk=limits["disk"],
        processes=limits["processes"],
        hidden=tuple(Path(path) for path in limits["hidden"]),
        keep=keep,
        cores=tuple(limits["cores"]),
        control=control,
    )


LONGEST_REQUEST = 1 << 16


def main() -> None:
    """Start and end candidates until the judge closes its end."""
    judge = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sandboxes = Sandboxes(driver.Driver(driver.build_driver()))
    disable_malloc_trim()
    try:
        judge.send(orjson.dumps({"ready": True}))
        while True:
            content, descriptors = _receive(judge)
            if not content:
                break
            judge.send(orjson.dumps(sandboxes.answer(orjson.loads(content), descriptors)))
    finally:
        sandboxes.close()


def _receive(judge: socket.socket) -> tuple[bytes, list[int]]:
    """One request with its descriptors; empty where the judge has ended."""
    content, ancillary, _, _ = judge.recvmsg(LONGEST_REQUEST, socket.CMSG_SPACE(32))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return content, list(descriptors)


if __name__ == "__main__":
    main()

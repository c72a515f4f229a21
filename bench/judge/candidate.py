"""A candidate: a Solution or a Definition's reference under the driver, with a Workload open, and how it is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import orjson
import torch

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.candidate_process import CandidateOrder
from kcap.bench.judge.driver.protocol import Report, Result
from kcap.bench.judge.input_pool import SEALS, Arena, ArenaMemory, InputPool, SetLayout
from kcap.bench.judge.messages import BuildReport, Started, StartRequest
from kcap.bench.judge.process import Done, ForkServer, Limits, NotBuilt, Process, ProcessEnded, remove_folder
from kcap.errors import KcapError
from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.solution import Solution

SETS_BYTES = 256 << 20  # of inputs and outputs of one run, on the CPU
MOST_SETS = 8192
FEW = 3  # invocations of a first run
CPU_ALIGN, CUDA_ALIGN = 64, 512  # bytes: of torch's allocators


@dataclass
class OpenWorkload:
    """What a candidate has open. `memory`: the descriptor of the addresses of its outputs, or on a GPU of the outputs
    themselves; `arena`: None on a GPU.
    """

    drawn: InputPool
    memory: int
    arena: Arena | None
    upcast: int = 0  # of the last run
    called: bool = False

    def close(self) -> None:
        os.close(self.memory)


@dataclass
class Candidate(Process):
    """`graphs`: on a GPU its batches are captured. `memory_file`: /proc/PID/mem, from which outputs are read."""

    destination: bool = False
    graphs: bool = True
    workload: OpenWorkload | None = field(default=None, repr=False)
    arena_memory: ArenaMemory | None = None
    memory_file: int | None = None

    def open(self, drawn: InputPool, sets: int = FEW) -> None:
        """Make `drawn` the Workload that it runs, with inputs for `sets` invocations at a time."""
        again = self.workload is not None and self.workload.drawn is drawn
        called = again and self.workload is not None and self.workload.called
        if not again:
            self.spent = self.compiled = 0.0
        self.forget()
        on_gpu = self.limits.gpu is not None
        flags = protocol.DESTINATION * self.destination + protocol.GRAPHS * self.graphs
        slot = drawn.slot_bytes
        layout = SetLayout.of(drawn, self.destination, CUDA_ALIGN if on_gpu else CPU_ALIGN)
        sizes = drawn.size, slot, drawn.variants, sets, flags, layout.stride
        content = protocol.open_message(drawn.contents, drawn.results, *sizes, [*layout.inputs, *layout.outputs])
        memory = os.memfd_create("outputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, max(sets * (slot if on_gpu else protocol.ADDRESS.size * len(drawn.results)), 1))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            arena = None if on_gpu else Arena(drawn, layout, sets, self._memory_of(layout.stride * sets))
        except BaseException:
            os.close(memory)
            raise
        self.workload = OpenWorkload(drawn, memory, arena, called=called)
        source = drawn.pool if self.arena_memory is None else self.arena_memory.descriptor
        assert source is not None
        report = self.ask(content, [memory, source]).report
        if report.code != protocol.FINE:
            raise ProcessEnded(report.text)

    @property
    def most(self) -> int:
        """Invocations of a run at most, on the CPU: all that it takes is there at once."""
        assert self.workload is not None
        return max(min(SETS_BYTES // max(self.workload.drawn.bytes, 1), MOST_SETS), 1)

    def run(self, seed: int, numbers: Sequence[int], upcast: int = 0) -> Done:
        """The invocations `numbers` of `seed`, which on a GPU follow one another; NoGraph if they cannot be captured.

        Their inputs are there, and it is let run, only when the clock runs. `upcast`: floating ones are in float64.
        """
        work = self.workload
        assert work is not None
        first, count = numbers[0], len(numbers)
        work.upcast, compiling = upcast, not work.called
        told = 0 if work.arena else seed  # on the CPU nobody in its process needs to know it
        if work.arena is None or not upcast:  # else there is nothing to prepare
            prepared = self.ask(protocol.prepare_message(first, count, upcast, told), compiling=compiling)
            if prepared.report.code == protocol.NO_GRAPH and self.graphs and self.limits.gpu:
                raise NoGraph(self, prepared.report.text)
            if prepared.report.code != protocol.FINE:
                return prepared
        if work.arena is not None:
            work.arena.fill(seed, numbers)
        done = self.ask(protocol.run_message(first, count, upcast, told), compiling=compiling)
        work.called = True
        return done

    def nothing(self) -> int:
        """Nanoseconds of a run of no invocations: what the way there and back takes."""
        return self.ask(protocol.run_message(0, 0, 0)).elapsed_ns

    def deliver(self, numbers: Sequence[int]) -> Report:
        """Make what these invocations of the last run, counted from 0, returned readable here, and look whether their
        inputs are as they were.
        """
        work = self.workload
        assert work is not None
        if work.arena is None:
            return self.ask(protocol.deliver_message(numbers)).report
        changed = next((name for name in map(work.arena.changed, numbers) if name is not None), None)
        if changed is None:
            return Report(protocol.FINE)
        return Report(protocol.INPUT, text=f"changed its input {changed}")

    def outputs(self, number: int) -> list[torch.Tensor]:
        """Copies of those of invocation `number` of the last run; ProcessEnded where it leaves none to be read."""
        work = self.workload
        assert work is not None
        found = []
        for index, result in enumerate(work.drawn.results):
            wide = work.upcast and result.dtype.is_floating_point
            room = torch.empty(result.shape, dtype=torch.float64 if wide else result.dtype)
            if room.numel():
                self._read(number, index, result, memoryview(raw_bytes(room).numpy()))
            found.append(room)
        return found

    def _read(self, number: int, index: int, result: Result, room: memoryview) -> None:
        work = self.workload
        assert work is not None
        if work.arena is None:
            os.preadv(work.memory, [room], number * work.drawn.slot_bytes + result.offset)
        elif self.destination:
            room[:] = work.arena.output(number, index)
        else:
            place = (number * len(work.drawn.results) + index) * protocol.ADDRESS.size
            (address,) = protocol.ADDRESS.unpack(os.pread(work.memory, protocol.ADDRESS.size, place))
            self._read_memory(address, room)

    def _read_memory(self, address: int, room: memoryview) -> None:
        """Of the process itself, which stands still."""
        assert self.memory_file is not None
        while room:
            try:
                count = os.preadv(self.memory_file, [room], address)
            except (OSError, OverflowError):
                count = 0
            if not count:
                raise ProcessEnded(f"its outputs are nowhere: {self.end(keep=True)}")
            address, room = address + count, room[count:]

    def forget(self) -> None:
        work, self.workload = self.workload, None
        if work is not None:
            work.close()

    def _memory_of(self, size: int) -> ArenaMemory:
        if self.arena_memory is None or self.arena_memory.size < size:
            self._close_memory()
            self.arena_memory = ArenaMemory(max(size, 1))
        return self.arena_memory

    def _close_memory(self) -> None:
        memory, self.arena_memory = self.arena_memory, None
        if memory is not None:
            memory.close()

    def _close(self) -> None:
        file, self.memory_file = self.memory_file, None
        if file is not None:
            os.close(file)
        super()._close()
        self._close_memory()


def fresh_seed() -> int:
    return secrets.randbits(63)


class NoGraph(Exception):
    """On a GPU: what `candidate` runs cannot be captured, and its process has to be started again."""

    def __init__(self, candidate: Candidate, reason: str) -> None:
        super().__init__(reason)
        self.candidate = candidate


def start_candidate(
    server: ForkServer,
    limits: Limits,
    code: Solution | Definition,
    after: Candidate | None = None,
    graphs: bool = True,
) -> Candidate:
    """Fork a process and build `code` in it; NotBuilt, ProcessEnded or TooSlow where that comes to nothing.

    `after`: an earlier process of the same code that has ended, whose build serves again. OSError or KcapError where
    the machine lacks what it takes. Whatever is raised, nothing is left open.
    """
    candidate = _fork(server, limits, code, after)
    candidate.graphs = graphs
    candidate.destination = isinstance(code, Solution) and code.spec.destination_passing_style
    try:
        _await_build(candidate)
    except BaseException:
        candidate.end()
        raise
    return candidate


def _fork(server: ForkServer, limits: Limits, code: Solution | Definition, after: Candidate | None) -> Candidate:
    with contextlib.ExitStack() as undo:
        if after is None:
            folder = Path(tempfile.mkdtemp(prefix="candidate-", dir=limits.scratch))
            undo.callback(remove_folder, folder)
        else:
            folder = after.folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.enter_context(ours)
        undo.enter_context(control)
        memory = os.memfd_create("report", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, memory)
        os.ftruncate(memory, protocol.REPORT_BYTES)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        with theirs, keepers:
            log = undo.enter_context(tempfile.TemporaryFile(dir=limits.scratch))
            request: StartRequest = {
                "sandbox": {
                    "folder": str(folder),
                    "memory": limits.memory,
                    "disk": limits.disk,
                    "processes": limits.processes,
                    "hidden": [str(path) for path in limits.hidden],
                    "cores": list(limits.cores),
                },
                "after": after.pid if after else None,
            }
            order = _order(folder, limits, code)
            given = [theirs.fileno(), memory, keepers.fileno(), log.fileno()]
            started = _ask_to_start(server, limits, request, order, given)
        undo.pop_all()
    return Candidate(server, limits, started["pid"], ours, control, memory, folder, log, started["confined"])


def _ask_to_start(
    server: ForkServer, limits: Limits, request: StartRequest, order: CandidateOrder, descriptors: list[int]
) -> Started:
    """`order` may be longer than a message, and goes in a file."""
    with tempfile.TemporaryFile(dir=limits.scratch) as written:
        written.write(orjson.dumps(order.to_json()))
        written.flush()
        return server.start(request, [*descriptors, written.fileno()])


def _order(folder: Path, limits: Limits, code: Solution | Definition) -> CandidateOrder:
    text = orjson.dumps(code.model_dump(mode="json")).decode()
    kind = "solution" if isinstance(code, Solution) else "definition"
    return CandidateOrder(str(folder), limits.device, limits.threads, **{kind: text})


def _await_build(candidate: Candidate) -> None:
    report = _read_build_report(candidate.built())
    if "failed" in report:
        raise NotBuilt(str(report["failed"]), str(report.get("log", "")) or candidate.printed())
    if "built" not in report:
        raise ProcessEnded(f"while it was built: {candidate.end(keep=True, gone=True)}")
    if candidate.limits.gpu is None:
        try:
            candidate.memory_file = os.open(f"/proc/{candidate.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise KcapError(f"a candidate's memory cannot be read: {error.strerror}") from None


def _read_build_report(content: bytes) -> BuildReport:
    """How building went, as its process says. Foreign code may have written it."""
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(report := orjson.loads(content), dict):
            return cast(BuildReport, report)
    return {}

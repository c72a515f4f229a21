"""A candidate: a Solution or a Definition's reference under the driver, with a Workload open."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.gate import Copy, Gate
from kcap.bench.judge.driver.gpu_memory import GpuMemory, MappedMemory, Pieces
from kcap.bench.judge.driver.protocol import Report, Result
from kcap.bench.judge.input_pool import SEALS, Arena, ArenaMemory, InputPool, OpenWorkload, SetLayout, aligned
from kcap.bench.judge.process import Done, Process, ProcessEnded, Stirred
from kcap.errors import KcapError
from kcap.replay.rebuild.memory import raw_bytes

SETS_BYTES = 256 << 20  # of inputs and outputs of one run, on the CPU
MOST_SETS = 8192
FEW = 3  # invocations of a first run
PATIENCE_S = 0.5  # with what runs on a GPU, before its process may see what is wrong with it
MOST_DISTURBED, MOST_AT_GATE = 5, 3  # runs, one after another; the first of them at a gate
MOST_WAYS = 15  # runs of nothing that are remembered
NOWHERE = "its outputs are nowhere"
RANDOM = secrets.SystemRandom()
CPU_ALIGN, CUDA_ALIGN = 64, 512  # bytes: of torch's allocators


@dataclass(frozen=True)
class Ran(Done):
    """`seed`: of its inputs. `outputs`: of invocations of the run, chosen at random while it stood still, by their
    place in it. On a GPU the clock runs until the judge has copies of them.
    """

    seed: int
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@dataclass
class Candidate(Process):
    """`graphs`: on a GPU its batches are captured. Outputs are read from `memory_file`, /proc/PID/mem, or on a GPU from
    `pieces` of its memory, by their addresses in the process. `ways`: nanoseconds of its latest runs of `nothing`, on a
    GPU of those since it opened a Workload.
    """

    destination: bool = False
    graphs: bool = True
    workload: OpenWorkload | None = field(default=None, repr=False)
    arena_memory: ArenaMemory | MappedMemory | None = None
    memory_file: int | None = None
    gate: Gate | None = None
    pieces: Pieces = field(default_factory=Pieces)
    ways: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_WAYS))

    def open(self, drawn: InputPool, sets: int = FEW) -> None:
        """Make `drawn` the Workload that it runs, with inputs for `sets` invocations at a time."""
        before = self.workload if self.workload is not None and self.workload.drawn is drawn else None
        if before is None:
            self.spent = self.compiled = 0.0
        self.forget()
        flags = protocol.DESTINATION * self.destination + protocol.GRAPHS * self.graphs
        gpu = self.limits.gpu_memory
        if gpu:
            self.ways.clear()
        layout = SetLayout.of(drawn, self.destination, CUDA_ALIGN if gpu else CPU_ALIGN)
        places = [*layout.inputs, *layout.outputs]
        content = protocol.open_message(drawn.contents, drawn.results, sets, flags, layout.stride, places)
        addresses = os.memfd_create("outputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(addresses, protocol.ADDRESS.size * (sets * len(drawn.results) + 1))
            fcntl.fcntl(addresses, fcntl.F_ADD_SEALS, SEALS)
            size = layout.stride * sets
            gate = aligned(size, protocol.GATE)
            memory = self._memory_of(gate + 2 * protocol.GATE if gpu else size)
            arena = Arena(drawn, layout, memory.bytes[:size], gpu)
        except BaseException:
            os.close(addresses)
            raise
        work = self.workload = OpenWorkload(drawn, sets, addresses, arena)
        if before is not None:
            work.called, work.stuck, work.gated = before.called, before.stuck, not before.stuck
        if gpu and isinstance(memory, MappedMemory):
            work.gate_address = memory.base + gate
            memory.bytes[gate:].zero_()
            arena.fill(fresh_seed(), range(sets))  # what is captured is called before, on inputs that do not count
        assert memory.descriptor is not None
        report = self.ask(content, [addresses, memory.descriptor]).report
        self._receive_pieces()
        if report.code != protocol.FINE:
            raise ProcessEnded(f"{report.text}: {self.end(keep=True)}")

    @property
    def most(self) -> int:
        """Invocations of a run at most, on the CPU: all that it takes is there at once, and no inputs recur."""
        assert self.workload is not None
        drawn = self.workload.drawn
        return max(min(SETS_BYTES // max(drawn.bytes, 1), drawn.draws.distinct or MOST_SETS, MOST_SETS), 1)

    def run(self, numbers: Sequence[int], seed: int | None = None, upcast: int = 0, chosen: int = 0) -> Ran:
        """The invocations `numbers` of `seed`, or of a fresh one; NoGraph if they cannot be captured.

        Their inputs are there, and it is let run, only when the clock runs, or it stands still then and what it has
        launched is let through a gate. `upcast`: floating ones are in float64.
        `chosen`: how many invocations' outputs are wanted. A run beside which anything else ran on the GPU is none, and
        comes to nothing but another: Stirred, where only this process can be why; KcapError, where others use the GPU.
        """
        gpu = self.limits.gpu_memory
        for attempt in range(MOST_DISTURBED):
            ran = self._run(numbers, fresh_seed() if seed is None else seed, upcast, chosen)
            if ran is not None:
                return ran
            if self.workload is not None:
                self.workload.arena.forget()
                if attempt + 1 == MOST_AT_GATE:
                    self.workload.gated = False  # it may be the gate that disturbs
            if gpu and not gpu.soon_quiet():
                break
        self.end(keep=True)
        if gpu and gpu.used_by_others():
            raise KcapError(f"others use {gpu.device}: nothing can be judged beside them")
        raise Stirred("the GPU goes on working for it when it has been stopped")

    def _run(self, numbers: Sequence[int], seed: int, upcast: int, chosen: int) -> Ran | None:
        """None, where anything else ran on the GPU."""
        work, gpu = self.workload, self.limits.gpu_memory
        assert work is not None
        count, compiling = len(numbers), not work.called
        if gpu or not upcast:  # else there is nothing to prepare
            prepared = self.ask(protocol.prepare_message(count, upcast), compiling=compiling).report
            if prepared.code == protocol.NO_GRAPH and self.graphs and gpu:
                raise NoGraph(self, prepared.text)
            if prepared.code != protocol.FINE:
                return Ran(prepared, 0, seed)
            self._receive_pieces()
        if gpu and self.gated and count > 1 and not upcast:
            return self._run_at_gate(gpu, numbers, seed, chosen)
        if not work.arena.fill(seed, numbers) or (gpu and not gpu.quiet()):
            return None
        outputs: dict[int, list[torch.Tensor]] = {}
        rooms = [self._rooms(upcast) for _ in range(min(chosen, count))]

        def keep() -> None:
            if self.report().code == protocol.FINE:
                self._receive_pieces()
                for place, room in zip(RANDOM.sample(range(count), len(rooms)), rooms, strict=True):
                    outputs[place] = self._outputs(place, room)

        content = protocol.run_message(count, upcast)
        if gpu is None:
            done = self.ask(content, compiling=compiling)
            keep()
        else:
            done = self._ask_gpu(gpu, content, keep, compiling)
        work.called = True
        if done.report.code == protocol.FINE:
            if len(outputs) < len(rooms):
                self.end(keep=True)
                raise Stirred("it reported that it was done when it had been stopped")
            if gpu and not gpu.quiet():
                return None
        return Ran(done.report, done.elapsed_ns, seed, outputs)

    @property
    def gated(self) -> bool:
        """Whether its graphs wait for a gate."""
        gpu = self.limits.gpu_memory
        return gpu is not None and gpu.gates and self.graphs and self.workload is not None and self.workload.gated

    def _run_at_gate(self, gpu: GpuMemory, numbers: Sequence[int], seed: int, chosen: int) -> Ran | None:
        """As `_run`, of a graph that is captured."""
        work, count = self.workload, len(numbers)
        assert work is not None
        work.arena.draw(seed, numbers)
        rooms = {place: self._rooms() for place in RANDOM.sample(range(count), min(chosen, count))}

        done = self._through_gate(gpu, count, lambda: [copy for each in rooms.items() for copy in self._copies(*each)])
        work.called = True
        if done is None or (done.report.code == protocol.FINE and not gpu.quiet()):
            return None
        return Ran(done.report, done.elapsed_ns, seed, rooms)

    def _through_gate(self, gpu: GpuMemory, count: int, copies: Callable[[], Sequence[Copy]]) -> Done | None:
        """A graph of `count` invocations, which waits at the gate, and `copies` of what it leaves, by a clock that runs
        from when that is opened; None where anything else ran on the GPU before, or all had not come through in time.

        Its process stands still meanwhile. What needs it, or takes PATIENCE_S, has no gate from then on.
        """
        work = self.workload
        assert work is not None
        work.gate_value += 2  # it opens in two steps
        address, value, spent = work.gate_address, work.gate_value, self.spent
        try:
            with gpu.at_gate(address, value, (self.limits.timeout - spent) / 2) as watch:
                prepared = self.ask(protocol.prepare_message(count, 0, value)).report
                if prepared.code != protocol.FINE or not prepared.method or watch.over:
                    gpu.open_gate(address, value)
                    if watch.over and prepared.method:  # it may still be at work
                        self.ask(protocol.run_message(count, 0))
                    work.stuck, work.gated = watch.over, False
                    if not gpu.gates_worked:
                        self.spent = spent
                    return None
                gate = self.gate = gpu.gate(address, value, copies())
                undisturbed = work.arena.deliver() and gpu.quiet()
            gate.open()
            if not gate.passed_within(PATIENCE_S):
                gpu.open_gate(address, value)
            self.spent += (time.perf_counter_ns() - gate.began_ns) / 1e9
            report, work.stuck = self.ask(protocol.run_message(count, 0)).report, watch.over
            if report.code == protocol.FINE:
                work.gated = not watch.over and gate.passed_within(PATIENCE_S) and gate.elapsed_ns < PATIENCE_S * 1e9
                gpu.gates_worked |= work.gated
            elif watch.over:
                raise KcapError(f"what waits at a gate on {gpu.device} does not get on")
        except Exception:
            self.end(keep=True)  # it may wait there still
            raise
        finally:
            self._close_gate()
        if report.code == protocol.FINE and not (undisturbed and work.gated):
            return None
        return Done(report, gate.elapsed_ns)

    def _close_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.close()

    def _ask_gpu(self, gpu: GpuMemory, content: bytes, keep: Callable[[], None], compiling: bool = False) -> Done:
        """As `ask`, by a clock that runs until `keep` has been done on the GPU, which waits for its turn there."""
        began = ended = time.perf_counter_ns()

        def told() -> None:
            nonlocal ended
            keep()
            gpu.wait()
            ended = time.perf_counter_ns()

        done = self.ask(content, compiling=compiling, told=told)
        return Done(done.report, max(done.elapsed_ns, ended - began))

    def nothing(self, chosen: int = 0) -> int:
        """Nanoseconds of a run of no invocations: what the way there and back takes, on a GPU with copies as large as
        the outputs of `chosen` invocations.
        """
        gpu, content = self.limits.gpu_memory, protocol.run_message(0, 0)
        if gpu is None:
            return self.ask(content).elapsed_ns
        rooms = [raw_bytes(room) for _ in range(chosen) for room in self._rooms()]
        written = gpu.staging(max(map(len, rooms), default=0))
        copies = [(room, written[: len(room)]) for room in rooms]
        for _ in range(MOST_DISTURBED):
            if self.gated and (through := self._through_gate(gpu, 0, lambda: copies)):
                return through.elapsed_ns

        def keep() -> None:
            self._receive_pieces()
            for room, source in copies:
                room.copy_(source)

        return self._ask_gpu(gpu, content, keep).elapsed_ns

    def changed(self, places: Iterable[int]) -> Report:
        """Whether the inputs of these invocations of the last run are as they were."""
        assert self.workload is not None
        changed = next((name for name in map(self.workload.arena.changed, places) if name is not None), None)
        if changed is None:
            return Report(protocol.FINE)
        return Report(protocol.INPUT, text=f"changed its input {changed}")

    def _rooms(self, upcast: int = 0) -> list[torch.Tensor]:
        """For the outputs of one invocation."""
        work, gpu = self.workload, self.limits.gpu_memory
        assert work is not None

        def room(result: Result) -> torch.Tensor:
            dtype = torch.float64 if upcast and result.dtype.is_floating_point else result.dtype
            return torch.empty(result.shape, dtype=dtype, device=gpu.device if gpu else "cpu")

        return [room(result) for result in work.drawn.results]

    def _outputs(self, place: int, rooms: list[torch.Tensor]) -> list[torch.Tensor]:
        """`rooms` with those of one invocation of the last run; ProcessEnded where it leaves none to be read."""
        work = self.workload
        assert work is not None
        if self.limits.gpu_memory is None and not self.destination:
            for index, room in enumerate(rooms):
                self._read_memory(self._address(place, index), memoryview(raw_bytes(room).numpy()))
        else:
            for to, source in self._copies(place, rooms):
                to.copy_(source)
        return rooms

    def _copies(self, place: int, rooms: list[torch.Tensor]) -> list[Copy]:
        """To `rooms`, from where one invocation's outputs are, or will be, in memory that the judge shares."""
        work = self.workload
        assert work is not None

        def source(index: int, size: int) -> torch.Tensor:
            if self.destination:
                return work.arena.output(place, index)
            return self._bytes_at(self._address(place, index), size)

        return [(raw_bytes(room), source(i, room.nbytes)) for i, room in enumerate(rooms) if room.numel()]

    def _address(self, place: int, index: int) -> int:
        assert self.workload is not None
        return self.workload.address(place * len(self.workload.drawn.results) + index)

    def _read_memory(self, address: int, room: memoryview) -> None:
        """Of the process itself, which stands still."""
        assert self.memory_file is not None
        while room:
            try:
                count = os.preadv(self.memory_file, [room], address)
            except (OSError, OverflowError):
                count = 0
            if not count:
                raise ProcessEnded(f"{NOWHERE}: {self.end(keep=True)}")
            address, room = address + count, room[count:]

    def _bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Of memory of a GPU that its driver made, or that it was given."""
        assert self.workload is not None
        arena, given = self.workload.address(self.workload.sets * len(self.workload.drawn.results)), self.workload.arena
        if arena <= address and address + size <= arena + len(given.bytes):
            return given.bytes[address - arena :][:size]
        if (found := self.pieces.find(address, size)) is None:
            raise ProcessEnded(f"{NOWHERE}: {self.end(keep=True)}")
        return found

    def _receive_pieces(self) -> None:
        """Note what its driver has told of memory of a GPU since."""
        if (gpu := self.limits.gpu_memory) is not None:
            try:
                self.pieces.receive(gpu, self.channel)
            except KcapError as error:
                raise ProcessEnded(f"its memory is not what it says, {error}: {self.end(keep=True)}") from None

    def forget(self) -> None:
        work, self.workload = self.workload, None
        if work is not None:
            work.close()

    def _memory_of(self, size: int) -> ArenaMemory | MappedMemory:
        """For `size` bytes, on the CPU with room to grow: pages are slow to come by."""
        gpu = self.limits.gpu_memory
        if gpu or self.arena_memory is None or self.arena_memory.size < size:  # on a GPU only the whole can be mapped
            self._close_memory()
            self.arena_memory = gpu.share(size) if gpu else ArenaMemory(max(size, min(2 * size, SETS_BYTES), 1))
        return self.arena_memory

    def _close_memory(self) -> None:
        memory, self.arena_memory = self.arena_memory, None
        if memory is not None:
            memory.close()

    def _close(self) -> None:
        file, self.memory_file = self.memory_file, None
        if file is not None:
            os.close(file)
        try:
            self._close_gate()  # before the memory goes that it copies from
        finally:
            super()._close()
        self._close_memory()
        self.pieces.close()


def fresh_seed() -> int:
    return secrets.randbits(63)


class NoGraph(Exception):
    """On a GPU: what `candidate` runs cannot be captured, and its process has to be started again."""

    def __init__(self, candidate: Candidate, reason: str) -> None:
        super().__init__(reason)
        self.candidate = candidate

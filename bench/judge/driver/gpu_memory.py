"""The judge on a GPU: memory that it shares with candidates, and whether anything runs there.

Memory is shared by the descriptors of CUDA's virtual memory management, which pass from process to process as those of
files do. Sets of inputs are the judge's; what a candidate returns lies in pieces that its driver made, and sent the
descriptors of.
"""

from __future__ import annotations

import array
import ctypes
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.gate import STUCK_S, Copy, Gate, StreamWords
from kcap.errors import KcapError

DRIVER = "libcuda.so.1"
PINNED, ON_DEVICE, AS_DESCRIPTOR, READ_AND_WRITE = 1, 1, 1, 3  # of CUmemAllocationProp and CUmemAccessDesc
PROBES = 5
BUSY_FACTOR, BUSY_S = 5, 1e-4  # an idle GPU's probes take less than so many times the quickest, or than so long each
MOST_INTERRUPTED = 20  # probes
MOST_S = 1e-3  # of the quickest of all
MOST_PIECES = 4096
GONE_S = 2.0  # until what a process ran is gone with it
LEAST_STUCK_S = 2.0  # of STUCK_S, where a candidate has less time left
WATCHED_S, MOST_BUSY_S = 1.0, 0.1  # of so long, an idle GPU looks busy for so long at most


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("rest", ctypes.c_uint64 * 2),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@dataclass
class MappedMemory:
    """`bytes`: of the memory, a tensor; `base`: its address here. `descriptor`: what shares it, where it is ours."""

    memory: GpuMemory
    base: int
    size: int
    handle: int
    bytes: torch.Tensor = field(repr=False)
    descriptor: int | None = None

    def close(self) -> None:
        """When no tensor lies in it any more."""
        del self.bytes
        self.memory.unmap(self.base, self.size, self.handle)
        if self.descriptor is not None:
            os.close(self.descriptor)


@dataclass
class GateWatch:
    """`over`: what was to happen at a gate has taken too long, and that was opened."""

    over: bool = False


class GpuMemory:
    """Of one GPU, in the judge's process; KcapError where its memory cannot be shared. `library`: of CUDA's driver."""

    def __init__(self, device: str, library: str = DRIVER) -> None:
        self.device = torch.device(device)
        self._probed = torch.zeros(64, device=device)  # the context is there, too
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._cuda = ctypes.CDLL(library)
        self._properties = _Properties(PINNED, AS_DESCRIPTOR, _Location(ON_DEVICE, self.device.index or 0))
        self._quickest = min(self._probe() for _ in range(4 * PROBES))
        if self._quickest > MOST_S:
            raise KcapError(f"others use {device}: nothing can be judged beside them")
        self.share(1).close()
        self._gate: Gate | None = None
        self.gates = self._open_gates()  # until one is given up and none has worked
        self.gates_worked = False

    def share(self, size: int) -> MappedMemory:
        """New memory of at least `size` bytes; KcapError where there is none."""
        torch.cuda.empty_cache()  # what was compared is no longer needed
        size, handle = self._whole(size), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(self._properties), _NOTHING)
        descriptor = ctypes.c_int(-1)
        try:
            where = ctypes.byref(descriptor)
            self._call("cuMemExportToShareableHandle", where, handle, ctypes.c_int(AS_DESCRIPTOR), _NOTHING)
            return self._mapped(handle, size, descriptor.value)
        except BaseException:
            self._cuda.cuMemRelease(handle)
            if descriptor.value >= 0:
                os.close(descriptor.value)
            raise

    def open(self, descriptor: int, size: int) -> MappedMemory:
        """A candidate's memory of `size` bytes; KcapError where that is not what it is."""
        handle = ctypes.c_uint64()
        given = ctypes.c_void_p(descriptor)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), given, ctypes.c_int(AS_DESCRIPTOR))
        try:
            return self._mapped(handle, size)
        except BaseException:
            self._cuda.cuMemRelease(handle)
            raise

    def unmap(self, base: int, size: int, handle: int) -> None:
        self.wait()
        self._cuda.cuMemUnmap(_size(base), _size(size))
        self._cuda.cuMemAddressFree(_size(base), _size(size))
        self._cuda.cuMemRelease(ctypes.c_uint64(handle))

    def wait(self) -> None:
        """Until all is done that was asked for here, but for what waits at a Gate."""
        torch.cuda.current_stream(self.device).synchronize()

    def gate(self, address: int, value: int, copies: Sequence[Copy]) -> Gate:
        """`address`: of its words; `value`: what opens it. `copies`: to be made once all has come through."""
        self._gate = Gate(self._words, self._gate_stream, address, value)
        self._gate.queue(copies)
        return self._gate

    def _open_gates(self) -> bool:
        """Make what gates take, while nothing waits for one; False where this driver has none."""
        self._context, self._words = ctypes.c_void_p(), StreamWords(self._cuda)
        word = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._gate_stream = torch.cuda.Stream(self.device, priority=-1)  # alone of its priority, it shares no queue
        self._spare_stream = torch.cuda.Stream(self.device)
        self.wait()
        try:
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            self.open_gate(word.data_ptr(), 1)
            self._words.wait(self._spare_stream, word.data_ptr(), 1)
        except (KcapError, AttributeError):
            return False
        self._spare_stream.synchronize()
        return True

    @contextmanager
    def at_gate(self, address: int, value: int, seconds: float) -> Iterator[GateWatch]:
        """For all that is done from when a candidate's work is launched at a gate until that is opened. Where it does
        not get on for `seconds`, at least LEAST_STUCK_S and at most STUCK_S, the gate is opened. If none has worked
        before, this driver lets one wait for the other, and there are none any more.
        """
        watch = GateWatch()
        longest = min(max(seconds, LEAST_STUCK_S), STUCK_S)
        timer = threading.Timer(longest, self._give_up, (watch, address, value))
        timer.daemon = True
        timer.start()
        try:
            yield watch
        finally:
            timer.cancel()
            timer.join(STUCK_S)

    def _give_up(self, watch: GateWatch, address: int, value: int) -> None:
        watch.over, self.gates = True, self.gates_worked
        if self._gate is not None:
            self._gate.let_through()
        self.open_gate(address, value)

    def open_gate(self, address: int, value: int) -> None:
        """Let through what waits there, in no time that counts; from any thread."""
        self._call("cuCtxSetCurrent", self._context)
        self._words.write(self._spare_stream, address, value)

    def staging(self, size: int) -> torch.Tensor:
        """`size` bytes that nobody else sees: the same for all, one after another."""
        if len(self._staging) < size:
            self._staging = self._staging.new_empty(0)
            torch.cuda.empty_cache()
            self._staging = self._staging.new_empty(size)
        return self._staging[:size]

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> float:
        """Seconds that it took on the GPU, where it waits for its turn."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        began.record(stream)
        to.copy_(source)
        ended.record(stream)
        self.wait()
        return float(began.elapsed_time(ended)) / 1e3

    def quiet(self) -> bool:
        """Whether nobody else runs anything. Processes take turns on a GPU, of milliseconds: a kernel that takes none
        is soon done only where it need not wait for its turn.
        """
        took = [self._probe() for _ in range(PROBES)]
        self._quickest = min(self._quickest, *took)
        return sum(took) <= PROBES * max(BUSY_FACTOR * self._quickest, BUSY_S)

    def soon_quiet(self) -> bool:
        """Whether it is, once what has ended is gone."""
        until = time.monotonic() + GONE_S
        while not (quiet := self.quiet()) and time.monotonic() < until:
            time.sleep(GONE_S / 100)
        return quiet

    def used_by_others(self) -> bool:
        """Whether others run anything there from time to time; to be asked when no candidate is left."""
        if not self.soon_quiet():
            return True
        busy, now = 0.0, time.monotonic()
        until = now + WATCHED_S
        while now < until:
            quiet, began = self.quiet(), now
            now = time.monotonic()
            busy += 0 if quiet else now - began
        return busy > MOST_BUSY_S

    def tensor_at(self, base: int, size: int) -> torch.Tensor:
        """The bytes of memory that is mapped here."""

        class Mapped:
            __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (base, False), "version": 3}

        return torch.as_tensor(Mapped(), device=self.device)

    def _probe(self) -> float:
        """Seconds that a kernel takes that does next to nothing, to its end; the next one's, where this thread lost its
        core meanwhile.
        """
        for _ in range(MOST_INTERRUPTED):
            lost, began = _cores_lost(), time.perf_counter()
            self._probed.add_(1)
            self.wait()
            took = time.perf_counter() - began
            if _cores_lost() == lost:
                break
        return took

    def _whole(self, size: int) -> int:
        least = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(least), ctypes.byref(self._properties), ctypes.c_int(0)
        )
        return -(-max(size, 1) // least.value) * least.value

    def _mapped(self, handle: ctypes.c_uint64, size: int, descriptor: int | None = None) -> MappedMemory:
        base = ctypes.c_uint64()
        access = _Access(self._properties.location, READ_AND_WRITE)
        self._call("cuMemAddressReserve", ctypes.byref(base), _size(size), _size(0), _size(0), _NOTHING)
        try:
            self._call("cuMemMap", base, _size(size), _size(0), handle, _NOTHING)
            self._call("cuMemSetAccess", base, _size(size), ctypes.byref(access), _size(1))
            memory = self.tensor_at(base.value, size)
        except BaseException:
            self._cuda.cuMemUnmap(base, _size(size))
            self._cuda.cuMemAddressFree(base, _size(size))
            raise
        return MappedMemory(self, base.value, size, handle.value, memory, descriptor)

    def _call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = getattr(self._cuda, name)
        if failed := function(*arguments):
            raise KcapError(f"{self.device}: memory cannot be shared: {name}: CUDA error {failed}")


@dataclass
class Pieces:
    """Memory of a candidate's on a GPU, by its addresses in that process."""

    known: dict[int, MappedMemory] = field(default_factory=dict)

    def receive(self, gpu: GpuMemory, channel: socket.socket) -> None:
        """Note what its driver has told on `channel` since; KcapError where what it says is no memory of a GPU's."""
        place = socket.CMSG_SPACE(array.array("i").itemsize)
        while True:
            try:
                content, ancillary, _, _ = channel.recvmsg(protocol.PIECE.size, place, socket.MSG_DONTWAIT)
            except OSError:
                return
            descriptors = array.array("i", b"".join(data for *_, data in ancillary))
            try:
                if not content:  # it has closed its end
                    return
                if len(content) == protocol.PIECE.size:
                    base, size = protocol.PIECE.unpack(content)
                    self._note(gpu, base, size, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def find(self, address: int, size: int) -> torch.Tensor | None:
        """The `size` bytes at `address`, if they lie in one piece."""
        for base, piece in self.known.items():
            if base <= address and address + size <= base + len(piece.bytes):
                return piece.bytes[address - base :][:size]
        return None

    def close(self) -> None:
        while self.known:
            self.known.popitem()[1].close()

    def _note(self, gpu: GpuMemory, base: int, size: int, descriptors: Sequence[int]) -> None:
        if base in self.known:
            self.known.pop(base).close()
        if size and len(descriptors) == 1 and len(self.known) < MOST_PIECES:
            self.known[base] = gpu.open(descriptors[0], size)


def _cores_lost() -> int:
    """How often others had this thread's core while it had work. See getrusage(2)."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


_size = ctypes.c_uint64
_NOTHING = ctypes.c_ulonglong(0)

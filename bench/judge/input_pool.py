"""The inputs of a Workload, drawn afresh for every invocation, and the memory in which a candidate has them.

The judge fills an `Arena` that it shares with a candidate, while that stands still: nothing can be computed ahead, and
filling is in no time. On a GPU it lies in the device's memory, and is filled there.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kcap.bench.accuracy import RTOL
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.driver.protocol import Content, Result
from kcap.replay.datasets.inputs import WorkloadInputs, definition_dtype
from kcap.replay.datasets.invocations import InvocationDraws
from kcap.replay.datasets.spreads import Spread
from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload


@dataclass
class InputPool:
    """`contents` and `results`: inputs and outputs, as the driver is told of them."""

    definition: Definition
    draws: InvocationDraws
    contents: list[Content]
    results: list[Result]

    @property
    def example(self) -> WorkloadInputs:
        return self.draws.example

    @property
    def varied(self) -> bool:
        """Whether one invocation's inputs differ from the next's."""
        return self.draws.varied

    @property
    def bytes(self) -> int:
        """Of one set of inputs and outputs."""
        inputs = (int(value.nbytes) for value in self.example.inputs if isinstance(value, torch.Tensor))
        return sum(inputs) + sum(result.bytes for result in self.results)

    def with_outputs_of(self, definition: Definition) -> InputPool:
        """The same inputs for another form of the Definition."""
        return replace(self, definition=definition, results=_results(definition, self.example))


def draw_inputs(
    definition: Definition, workload: Workload, dataset: Dataset | None, limit: int | None, spread: Spread | None = None
) -> InputPool:
    """Fresh inputs; raises what `make_inputs` does."""
    draws = InvocationDraws(definition, workload, dataset, secrets.randbits(62), spread, limit=limit)
    return InputPool(definition, draws, _contents(definition, draws.example), _results(definition, draws.example))


def _contents(definition: Definition, inputs: WorkloadInputs) -> list[Content]:
    contents = []
    for name, value in zip(definition.inputs, inputs.inputs, strict=True):
        if isinstance(value, torch.Tensor):
            dtype = protocol.dtype_name(value.dtype)
            contents.append(Content(protocol.TENSOR, 0, name, dtype, tuple(value.shape)))
        else:
            contents.append(replace(protocol.scalar_content(value), name=name))
    return contents


def _results(definition: Definition, inputs: WorkloadInputs) -> list[Result]:
    results = []
    for name, output in definition.outputs.items():
        dtype, shape = definition_dtype(output.dtype), definition.sizes(output.shape or (), inputs.axes)
        if dtype.is_floating_point and dtype not in RTOL:
            raise Skip(f"outputs.{name}: a Definition with outputs of {output.dtype} is not supported")
        results.append(Result(name, dtype, tuple(shape)))
    return results


def aligned(size: int, to: int) -> int:
    return -(-size // to) * to


GAPS = 64  # alignments that chance may leave before a tensor: no two sets of Workloads lie alike


@dataclass(frozen=True)
class SetLayout:
    """Where the tensors of one invocation lie in its set, in bytes, and how far it is to the next set's."""

    inputs: list[int]
    outputs: list[int]
    stride: int

    @classmethod
    def of(cls, drawn: InputPool, destination: bool, align: int) -> SetLayout:
        """`destination`: outputs have a place, too; one that stands for an input that is written has that input's."""
        end = 0

        def place(size: int) -> int:
            nonlocal end
            begin = aligned(end, align) + align * secrets.randbelow(GAPS)
            end = begin + size
            return begin

        inputs = [place(int(value.nbytes)) if isinstance(value, torch.Tensor) else 0 for value in drawn.example.inputs]
        written = {output: name for name, output in drawn.definition.written_inputs.items()}
        by_name = dict(zip(drawn.definition.inputs, inputs, strict=True))
        outputs = [
            by_name[written[result.name]] if result.name in written else place(result.bytes)
            for result in (drawn.results if destination else ())
        ]
        return cls(inputs, outputs, aligned(end, align) + align * (1 + secrets.randbelow(GAPS)))


class ArenaMemory:
    """Memory that the judge and one candidate share on the CPU. It outlasts a Workload."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._view = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes = torch.frombuffer(self._view, dtype=torch.uint8)

    def close(self) -> None:
        """When no Arena is in it any more."""
        del self.bytes
        with contextlib.suppress(OSError):
            self._view.madvise(mmap.MADV_REMOVE)  # whoever else still has it
        self._view.close()
        os.close(self.descriptor)


COPY_SHARE, COPY_S = 0.1, 2e-4  # by so much, and so many seconds, a copy on an idle GPU may take longer than another


class Arena:
    """Sets of inputs of one candidate's invocations, and of outputs in destination passing style, in bytes. `filled`:
    the seed and the invocations that are there.

    On a GPU they are filled elsewhere, and come into a candidate's sight in one copy: a stream of its own that waits
    for a value to change has no more time than that takes, and cannot work meanwhile without making it take longer.
    """

    def __init__(self, drawn: InputPool, layout: SetLayout, memory: torch.Tensor, gpu: GpuMemory | None) -> None:
        self.drawn, self.layout, self.bytes, self._gpu = drawn, layout, memory, gpu
        self._bytes = memory.view(-1, layout.stride)
        self._quickest: dict[int, float] = {}  # seconds of a copy, by sets
        self._written = {*drawn.definition.written_inputs}
        self.filled: tuple[int, Sequence[int]] = (0, ())
        self._staged: torch.Tensor | None = None  # on a GPU: what is drawn and not delivered yet

    def fill(self, seed: int, numbers: Sequence[int]) -> bool:
        """`draw` and `deliver`."""
        self.draw(seed, numbers)
        return self.deliver()

    def draw(self, seed: int, numbers: Sequence[int]) -> None:
        """Make a set with the inputs of each of the invocations `numbers` of `seed`; outputs hold bits that are none.

        What is asked for again, to see how long it takes, is there already, unless it may be written.
        """
        if self.filled == (seed, numbers) and not self._written:
            return
        self.filled = seed, numbers
        count, stride = len(numbers), self.layout.stride
        sets = self._bytes[:count] if self._gpu is None else self._gpu.staging(count * stride).view(count, stride)
        for at, result in zip(self.layout.outputs, self.drawn.results, strict=False):
            sets[:, at : at + result.bytes].fill_(0xFF)
        if isinstance(numbers, range):
            self.drawn.draws.fill(seed, numbers.start, self._inputs(sets))
        else:
            for place, number in enumerate(numbers):
                self.drawn.draws.fill(seed, number, self._inputs(sets[place : place + 1]))
        self._staged = None if self._gpu is None else sets

    def deliver(self) -> bool:
        """Bring what was drawn into a candidate's sight. False, where something else ran on the GPU meanwhile."""
        sets, self._staged = self._staged, None
        if sets is None or self._gpu is None:
            return True
        count = len(sets)
        took = self._gpu.copy(self._bytes[:count], sets)
        quickest = self._quickest[count] = min(took, self._quickest.get(count, took))
        return took <= (1 + COPY_SHARE) * quickest + COPY_S

    def forget(self) -> None:
        """Fill anew what is asked for again."""
        self.filled = 0, ()

    def changed(self, place: int) -> str | None:
        """The name of an input in a set of the last run that is not what it was, and must be."""
        seed, numbers = self.filled
        drawn = self.drawn.draws.draw(seed, numbers[place], self._bytes.device)
        inputs = self._inputs(self._bytes[place : place + 1])
        for name, found, value in zip(self.drawn.definition.inputs, inputs, drawn, strict=True):
            if found is None or name in self._written:
                continue
            if not torch.equal(raw_bytes(found), raw_bytes(value)):
                return name
        return None

    def output(self, number: int, index: int) -> torch.Tensor:
        """The bytes of an output in destination passing style."""
        at, size = self.layout.outputs[index], self.drawn.results[index].bytes
        return self._bytes[number, at : at + size]

    def _inputs(self, sets: torch.Tensor) -> list[torch.Tensor | None]:
        """Of `sets`, each [sets, *shape]; None for a scalar."""
        found: list[torch.Tensor | None] = []
        for value, at in zip(self.drawn.example.inputs, self.layout.inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                found.append(None)
                continue
            part = sets[:, at : at + value.nbytes]
            found.append(part.view(value.dtype).view(len(part), *value.shape))
        return found


@dataclass
class OpenWorkload:
    """What a candidate has open. `addresses`: the descriptor of its outputs', on a GPU with the arena's behind them.
    `gate_address`: there, of the words of its gate; `gate_value`: what opens it for the latest run. `gated`: until what
    waits there does not get on; `stuck`: for good, however often it is opened.
    """

    drawn: InputPool
    sets: int
    addresses: int
    arena: Arena
    called: bool = False
    gate_address: int = 0
    gate_value: int = 0
    gated: bool = True
    stuck: bool = False

    def address(self, number: int) -> int:
        (found,) = protocol.ADDRESS.unpack(
            os.pread(self.addresses, protocol.ADDRESS.size, number * protocol.ADDRESS.size)
        )
        return int(found)

    def close(self) -> None:
        os.close(self.addresses)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

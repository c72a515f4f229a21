"""The inputs of a Workload for every invocation, made from one pool of memory.

What is random has more content in the pool than one invocation takes. On the CPU that is put together from small pieces
of it in an order that nobody can tell before, each at most once; on a GPU it is one piece, which begins anywhere. What
a rule made (offsets, pages, experts) comes in several variants. What the Workload itself gives is the same each time.

On the CPU the judge alone has the pool, and fills an `Arena` that it shares with a candidate, while that stands still:
nothing can be computed ahead, and filling is in no time. On a GPU the driver fills them from a copy of the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kcap.bench.accuracy import RTOL
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.driver import build_driver
from kcap.bench.judge.driver.protocol import Content, Result
from kcap.errors import KcapError
from kcap.replay.datasets.inputs import WorkloadInputs, definition_dtype, draw_tensor, make_inputs
from kcap.replay.rebuild.memory import raw_bytes
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload

ALIGN = 64
VARIANTS = 3
LEAST_SLACK, MOST_SLACK = 1 << 12, 1 << 22  # elements
SLACK_SHARE = 4  # of an input's elements, one in so many


@dataclass
class InputPool:
    """`pool`: a sealed file in memory. `varied`: whether one invocation's inputs differ from the next's."""

    definition: Definition
    example: WorkloadInputs
    contents: list[Content]
    results: list[Result]
    pool: int
    size: int
    variants: int
    notes: list[str] = field(default_factory=list)

    @property
    def varied(self) -> bool:
        return self.variants > 1 or any(content.kind == protocol.POOLED for content in self.contents)

    @property
    def bytes(self) -> int:
        """Of one set of inputs and outputs."""
        return self.input_bytes + sum(result.reserved for result in self.results)

    @property
    def input_bytes(self) -> int:
        """Bytes of one set of inputs."""
        return sum(int(value.nbytes) for value in self.example.inputs if isinstance(value, torch.Tensor))

    def close(self) -> None:
        os.close(self.pool)


@contextmanager
def open_input_pool(
    definition: Definition, workload: Workload, dataset: Dataset | None, limit: int | None
) -> Iterator[InputPool]:
    """Fresh inputs; raises what `make_inputs` does. They end with the context."""
    variants = [make_inputs(definition, workload, dataset, "cpu", secrets.randbits(62), limit)]
    if "ruled" in variants[0].origins.values():
        more = (
            make_inputs(definition, workload, dataset, "cpu", secrets.randbits(62), limit) for _ in range(VARIANTS - 1)
        )
        variants += [variant for variant in more if variant.axes == variants[0].axes]
    drawn = _fill_pool(definition, variants)
    try:
        yield drawn
    finally:
        drawn.close()


def _fill_pool(definition: Definition, variants: list[WorkloadInputs]) -> InputPool:
    pool = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        contents, size = _contents(pool, definition, variants)
        results = _results(definition, variants[0])
        return InputPool(definition, variants[0], contents, results, pool, size, len(variants))
    except BaseException:
        os.close(pool)
        raise


def _contents(pool: int, definition: Definition, variants: list[WorkloadInputs]) -> tuple[list[Content], int]:
    """Write the content of all inputs to `pool`, and seal it; what the driver is told of them, and the bytes."""
    end, contents = 0, []
    for index, name in enumerate(definition.inputs):
        values = [variant.inputs[index] for variant in variants]
        drawn = definition.inputs[name].dtype if variants[0].origins[name] == "drawn" else None
        content, end = _add_input(pool, name, values, drawn, end)
        contents.append(content)
    os.ftruncate(pool, max(end, 1))
    fcntl.fcntl(pool, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return contents, max(end, 1)


def _add_input(pool: int, name: str, values: list[Any], drawn: str | None, end: int) -> tuple[Content, int]:
    """Write the content of one input at `end` of the pool; what the driver is told of it, and the new end.

    `drawn`: the dtype, in the Definition's words, of one that is random.
    """
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return protocol.scalar_content(first), end
    dtype, shape = protocol.dtype_name(first.dtype), tuple(first.shape)
    if drawn:
        slack = min(max(first.numel() // SLACK_SHARE, LEAST_SLACK), MOST_SLACK) if first.numel() else 0
        more = draw_tensor([slack], drawn, torch.Generator().manual_seed(secrets.randbits(62)))
        _write(pool, torch.cat([raw_bytes(first), raw_bytes(more)]), end)
        content = Content(protocol.POOLED, 0, name, dtype, shape, end, slack)
        return content, _aligned(end + (first.numel() + slack) * first.itemsize)
    stride = _aligned(first.nbytes)
    for number, value in enumerate(values):
        _write(pool, value, end + number * stride)
    return Content(protocol.FIXED, 0, name, dtype, shape, end, 0, stride), end + len(values) * stride


def _write(pool: int, tensor: torch.Tensor, offset: int) -> None:
    content = memoryview(raw_bytes(tensor).numpy())
    while content:
        done = os.pwrite(pool, content, offset)
        content, offset = content[done:], offset + done


def _results(definition: Definition, inputs: WorkloadInputs) -> list[Result]:
    results, end = [], 0
    for name, output in definition.outputs.items():
        dtype, shape = definition_dtype(output.dtype), definition.sizes(output.shape or (), inputs.axes)
        if dtype.is_floating_point and dtype not in RTOL:
            raise Skip(f"outputs.{name}: a Definition with outputs of {output.dtype} is not supported")
        reserved = _aligned(max(dtype.itemsize, 8 if dtype.is_floating_point else 1) * torch.Size(shape).numel())
        results.append(Result(name, dtype, tuple(shape), end, reserved))
        end += reserved
    return results


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Arena:
    """The inputs of one candidate's invocations on the CPU, and their outputs in destination passing style.

    `opening`: what the candidate is told of the Workload. KcapError where there is no memory for it.
    """

    def __init__(self, opening: bytes, drawn: InputPool) -> None:
        self._library = _filler_library()
        try:
            self._handle = self._library.kcap_filler(opening, len(opening), drawn.pool)
        except RuntimeError as error:
            raise KcapError(str(error)) from None
        size = self._library.kcap_filler_bytes(self._handle)
        self.descriptor = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self.view = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        base = ctypes.addressof((ctypes.c_char * 0).from_buffer(self.view))
        self._library.kcap_filler_begin(self._handle, base)

    def fill(self, seed: int, first: int, count: int) -> None:
        """Fill the inputs of `count` invocations of `seed`, from number `first` on; outputs hold bits that are none."""
        self._library.kcap_filler_fill(self._handle, seed, first, count)

    def changed(self, number: int) -> int | None:
        """The first input of an invocation of the last batch that is not what it was, by its place."""
        index = int(self._library.kcap_filler_changed(self._handle, number))
        return None if index < 0 else index

    def output(self, number: int, index: int, size: int) -> bytes:
        """An output in destination passing style: `size` bytes."""
        at = self._library.kcap_filler_output(self._handle, number, index)
        return self.view[at : at + size]

    def close(self) -> None:
        self._library.kcap_filler_close(self._handle)
        with contextlib.suppress(OSError):
            self.view.madvise(mmap.MADV_REMOVE)  # whoever else still has it
        self.view.close()
        os.close(self.descriptor)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@functools.cache
def _filler_library() -> ctypes.PyDLL:
    import torch  # noqa: F401  the library needs its libraries

    library = ctypes.PyDLL(str(build_driver()))
    handle, number = ctypes.c_void_p, ctypes.c_uint32
    library.kcap_filler.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    library.kcap_filler.restype = handle
    library.kcap_filler_bytes.argtypes, library.kcap_filler_bytes.restype = [handle], ctypes.c_size_t
    library.kcap_filler_begin.argtypes, library.kcap_filler_begin.restype = [handle, handle], None
    library.kcap_filler_output.argtypes = [handle, number, number]
    library.kcap_filler_output.restype = ctypes.c_size_t
    library.kcap_filler_fill.argtypes = [handle, ctypes.c_uint64, number, number]
    library.kcap_filler_fill.restype = None
    library.kcap_filler_changed.argtypes = [handle, number]
    library.kcap_filler_close.argtypes, library.kcap_filler_close.restype = [handle], None
    return library

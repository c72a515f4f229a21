"""The driver: what calls and times a Solution in its own process, in C++, and alone talks to the judge there."""

from __future__ import annotations

import array
import ctypes
import functools
import mmap
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcap.capture import native_build

SOURCE = Path(__file__).with_name("driver.cpp")


class Driver:
    """The driver, loaded into this process: before any Solution's code is."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.PyDLL(str(library))
        self._library.kcap_open.argtypes = [ctypes.c_char_p, ctypes.py_object]
        self._library.kcap_open.restype = ctypes.c_void_p
        self._library.kcap_serve.argtypes = [ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
        self._library.kcap_serve.restype = None
        self._device: int | None = None

    def use_gpu(self, library: str, torch: tuple[Any, ...]) -> None:
        """From now on invocations run on a GPU: `library` and `torch` as kcap.bench.integrity.driver.gpu has them."""
        self._device = self._library.kcap_open(library.encode(), torch)

    def serve(self, socket: int, run: Callable[..., Any], watched: tuple[tuple[Any, str, Any, str], ...]) -> None:
        """Call `run` as the judge at the other end of `socket` asks, until it closes that."""
        self._library.kcap_serve(socket, run, watched, self._device)


class Filler:
    """The inputs of one Workload's batches, made in the judge's own process; `opening`: what candidates are told of it.

    RuntimeError where `pool`, the descriptor of what they are made of, cannot be mapped.
    """

    def __init__(self, opening: bytes, pool: int) -> None:
        self._library = _of_the_judge()
        self._handle = self._library.kcap_filler(opening, len(opening), pool)

    @property
    def most(self) -> int:
        """Bytes that the inputs of all sets take at most."""
        return int(self._library.kcap_filler_most(self._handle))

    def fill(self, memory: mmap.mmap, seed: int, first: int, count: int, places: array.array[int]) -> int:
        """Fill `memory` for `count` invocations, and `places`, where in it each input of each lies; the bytes taken."""
        base = (ctypes.c_char * len(memory)).from_buffer(memory)
        room = (ctypes.c_uint64 * len(places)).from_buffer(places)
        return int(self._library.kcap_filler_fill(self._handle, base, seed, first, count, room))

    def changed(self, number: int) -> int | None:
        """The place of the first input of an invocation of the last batch that is no longer what it was filled with."""
        found = int(self._library.kcap_filler_changed(self._handle, number))
        return None if found < 0 else found

    def close(self) -> None:
        self._library.kcap_filler_close(self._handle)


@functools.cache
def _of_the_judge() -> ctypes.PyDLL:
    import torch  # noqa: F401  the library needs its libraries

    library = ctypes.PyDLL(str(build()))
    handle, number = ctypes.c_void_p, ctypes.c_uint32
    library.kcap_filler.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    library.kcap_filler.restype = handle
    library.kcap_filler_fill.argtypes = [handle, handle, ctypes.c_uint64, number, number, handle]
    library.kcap_filler_fill.restype = ctypes.c_size_t
    library.kcap_filler_most.argtypes, library.kcap_filler_most.restype = [handle], ctypes.c_size_t
    library.kcap_filler_changed.argtypes = [handle, number]
    library.kcap_filler_close.argtypes, library.kcap_filler_close.restype = [handle], None
    return library


def build() -> Path:
    """The compiled driver; native_build.Unavailable if it cannot be had."""
    include = f"-I{sysconfig.get_path('include')}"
    return native_build.build([SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))], [include, "-ltorch_python"])

"""The driver: what calls a Solution in its own process, in C++, as the judge asks."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcap.system import native_build

SOURCE = Path(__file__).with_name("driver.cpp")


class Driver:
    """The driver, loaded into this process: before any Solution's code is."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self._library = ctypes.PyDLL(str(library))
        self._library.kcap_open.argtypes = [ctypes.c_char_p, ctypes.py_object]
        self._library.kcap_open.restype = ctypes.c_void_p
        self._library.kcap_serve.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p]
        self._library.kcap_serve.restype = None
        self._device: int | None = None

    def use_gpu(self, library: str, torch: tuple[Any, ...]) -> None:
        """From now on invocations run on a GPU: `library` and `torch` as kcap.bench.judge.driver.gpu has them."""
        self._device = self._library.kcap_open(library.encode(), torch)

    def serve(self, socket: int, report: int, run: Callable[..., Any]) -> None:
        """Call `run` as the judge at the other end of `socket` asks, until it closes that.

        `report`: the descriptor of the memory in which it finds what came of each message.
        """
        self._library.kcap_serve(socket, report, run, self._device)


def build_driver() -> Path:
    """The compiled driver; native_build.Unavailable if it cannot be had."""
    include = f"-I{sysconfig.get_path('include')}"
    return native_build.build([SOURCE, *sorted(SOURCE.parent.glob("native/*.h"))], [include, "-ltorch_python"])

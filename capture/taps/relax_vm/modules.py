"""Modules of TVM's: `native.cpp`, and one of functions in Python, such as stands for a VM."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kcap.system import native_build

NATIVE = Path(__file__).with_name("native.cpp")
_numbers = itertools.count()
_kept: list[Any] = []  # what C++ has the address of


@functools.cache
def native(recorder: str) -> Any:
    """`native.cpp` for the native recorder at this path; native_build.Unavailable where it cannot be built."""
    import tvm_ffi
    from tvm_ffi import libinfo

    folders = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    libraries = (recorder, libinfo.find_libtvm_ffi())
    built = native_build.build([NATIVE], [*(f"-I{folder}" for folder in folders), *libraries])
    return tvm_ffi.load_module(str(built))


class Word(ctypes.Structure):
    """`TVMFFIAny` of tvm-ffi's C interface: 16 bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("word", ctypes.c_int64))


SYMBOL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(Word))


def module_of(functions: Mapping[str, Callable[..., Any]]) -> Any:
    """A module of TVM's with these functions: they are symbols of a system library of their own."""
    import tvm_ffi

    prefix = f"kcap{os.getpid()}_{next(_numbers)}_"
    register = tvm_ffi.LIB.TVMFFIEnvModRegisterSystemLibSymbol
    for name, function in functions.items():
        converted = tvm_ffi.convert(function)
        call = _symbol(converted.__chandle__())
        _kept.extend((converted, call))
        register(f"__tvm_ffi_{prefix}{name}".encode(), ctypes.cast(call, ctypes.c_void_p))
    return tvm_ffi.system_lib(prefix)


def _symbol(handle: int) -> Any:
    """A C function that calls the tvm-ffi Function of `handle`."""
    import tvm_ffi

    call = tvm_ffi.LIB.TVMFFIFunctionCall

    def symbol(_: Any, args: Any, count: int, result: Any) -> int:
        return int(call(ctypes.c_void_p(handle), ctypes.c_void_p(args), ctypes.c_int32(count), result))

    return SYMBOL(symbol)

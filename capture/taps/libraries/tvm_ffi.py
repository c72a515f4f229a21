"""tvm-ffi modules: the functions that a module hands out tell of their calls, as `tvm::name`.

What is handed out stays a tvm-ffi Function, so that it can be passed on. Inside another library's call it is that
call's detail. The library of a module that is loaded from a file is kept when one of its functions is first recorded.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.compiler import is_dynamo_compiling

from kcap.capture.hooks.binding import Binder
from kcap.capture.hooks.patching import MARK, namespace
from kcap.capture.taps.libraries.library import Calls, Function, LibraryTap, Listener
from kcap.errors import KcapError

PACKAGE = "tvm_ffi"
METHOD = "get_function"  # attributes and items of a module come through it
API, LOAD = "_ffi_api", "ModuleLoadFromFile"  # every way to load a file comes through it
LOADED_FILE = "_kcap_loaded_file"  # a module's attribute
LARGEST = 256 << 20  # bytes of a library that is kept
NO_FILE = "no file of its module is known: it was not loaded from one, or before kcap was there"
NOT_KEPT = "the file of its module could not be read, or not be kept, when it was first called"
TOO_LARGE = f"the file of its module has more than {LARGEST >> 20} MiB"
REPLACED = "the file of its module was replaced before it was first called"


@dataclass(frozen=True)
class LoadedFile:
    """What a module was loaded from; by its numbers it is told whether the file is still the same."""

    path: Path
    inode: int
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> LoadedFile:
        status = os.stat(path)
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def keep(self, listener: Listener) -> dict[str, str]:
        """Keep it; what the Launches of its functions say of it."""
        if self.size > LARGEST:
            return {"unread": TOO_LARGE}
        try:
            content = self.path.read_bytes()
            same = LoadedFile.of(self.path) == self
            return {"kernel": listener.library(content)} if same else {"unread": REPLACED}
        except OSError:
            return {"unread": NOT_KEPT}


def install(listener: Listener) -> LibraryTap:
    """Record the calls of the functions that tvm-ffi's modules hand out from now on."""
    return LibraryTap(PACKAGE, [PACKAGE], listener, find)


def find(module: ModuleType, calls: Calls) -> Iterator[tuple[Any, str, Function]]:
    """The method of `tvm_ffi.Module` that hands out functions, and what loads a module from a file."""
    if module.__name__ == PACKAGE and "Module" in namespace(module):  # else its import is under way
        yield module.Module, METHOD, _handing_out(namespace(module.Module)[METHOD], module.Function, calls)
        api = namespace(module).get(API)
        if api is not None and LOAD in namespace(api):
            yield api, LOAD, _loading(namespace(api)[LOAD], calls)


def _loading(original: Function, calls: Calls) -> Function:
    def load(path: str, *args: Any) -> Any:
        module = original(path, *args)
        try:
            if not calls.off:
                module.__dict__[LOADED_FILE] = LoadedFile.of(Path(path).absolute())
        except OSError:  # the file is gone already: its functions have no library
            pass
        except Exception as error:
            calls.fail(error)
        return module

    setattr(load, MARK, calls.tap)
    return load


def _handing_out(original: Function, function_type: Any, calls: Calls) -> Function:
    if not hasattr(function_type, "__move_handle_from__"):
        raise KcapError("this tvm-ffi gives no way to make one of its Functions recorded")
    recorded = _recorded(function_type, calls)

    @functools.wraps(original)
    def get_function(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        function = original(self, name, *args, **kwargs)
        if calls.off or type(function) is not function_type:
            return function
        return recorded.of(function, name, getattr(self, "__dict__", {}).get(LOADED_FILE))

    setattr(get_function, MARK, calls.tap)
    return get_function


def _recorded(function_type: Any, calls: Calls) -> Any:
    listener, names = calls.listener, Binder()

    @functools.cache
    def library(file: LoadedFile | None) -> dict[str, str]:
        return {"unread": NO_FILE} if file is None else file.keep(listener)

    def number_launch(function: str, file: LoadedFile | None) -> int:
        number = listener.launch({"language": "tvm", "function": function, **library(file)})
        return -1 if number is None else number

    class Recorded(function_type):
        """A Function that took over another's handle."""

        @classmethod
        def of(cls, function: Any, name: str, file: LoadedFile | None) -> Any:
            recorded = cls.__new__(cls)
            recorded.launch = functools.cache(functools.partial(number_launch, name, file))
            recorded.operator = f"tvm::{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
            if hasattr(function, "release_gil"):
                recorded.release_gil = function.release_gil
            recorded.__move_handle_from__(function)
            return recorded

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not listener.listening:
                return super().__call__(*args, **kwargs)
            return calls.run(super().__call__, self.operator, names, args, kwargs, True, True, self.launch)

    return Recorded

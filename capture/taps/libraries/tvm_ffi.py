"""tvm-ffi modules: the functions that a module hands out tell of their calls, as `tvm::name`.

What is handed out stays a tvm-ffi Function, so that it can be passed on. Inside another library's call it is that
call's detail.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.compiler import is_dynamo_compiling

from kcap.capture.hooks.binding import Binder
from kcap.capture.hooks.patching import MARK, namespace
from kcap.capture.taps.libraries.library import Calls, Function, LibraryTap, Listener
from kcap.errors import KcapError

PACKAGE = "tvm_ffi"
METHOD = "get_function"  # attributes and items of a module come through it


def install(listener: Listener) -> LibraryTap:
    """Record the calls of the functions that tvm-ffi's modules hand out from now on."""
    return LibraryTap(PACKAGE, [PACKAGE], listener, find)


def find(module: ModuleType, calls: Calls) -> Iterator[tuple[Any, str, Function]]:
    """The method of `tvm_ffi.Module` that hands out functions."""
    if module.__name__ == PACKAGE and "Module" in namespace(module):  # else its import is under way
        yield module.Module, METHOD, _handing_out(namespace(module.Module)[METHOD], module.Function, calls)


def _handing_out(original: Function, function_type: Any, calls: Calls) -> Function:
    if not hasattr(function_type, "__move_handle_from__"):
        raise KcapError("this tvm-ffi gives no way to make one of its Functions recorded")
    recorded = _recorded(function_type, calls)

    @functools.wraps(original)
    def get_function(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        function = original(self, name, *args, **kwargs)
        return function if calls.off or type(function) is not function_type else recorded.of(function, name)

    setattr(get_function, MARK, calls.tap)
    return get_function


def _recorded(function_type: Any, calls: Calls) -> Any:
    listener, names = calls.listener, Binder()

    class Recorded(function_type):
        """A Function that took over another's handle."""

        @classmethod
        def of(cls, function: Any, name: str) -> Any:
            recorded = cls.__new__(cls)
            recorded.operator = f"tvm::{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
            if hasattr(function, "release_gil"):
                recorded.release_gil = function.release_gil
            recorded.__move_handle_from__(function)
            return recorded

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not listener.listening:
                return super().__call__(*args, **kwargs)
            return calls.run(super().__call__, self.operator, names, args, kwargs, detail=True)

    return Recorded

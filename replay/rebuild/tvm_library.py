"""A kernel of a TVM library in a Recording, run alone: no Relax VM, and no cache, is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kcap.replay.rebuild.operators import Alias, Parameter, Parameters
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.records import Call

INSTALL = "needs apache-tvm: pip install apache-tvm"

WRITTEN: Mapping[str, frozenset[str]] = {  # of the paged cache's kernels; any other writes its last argument
    "tvm::transpose_append_mha": frozenset({"pages"}),
    "tvm::transpose_append_mla": frozenset({"pages"}),
    "tvm::split_rotary": frozenset({"q", "k", "v"}),
    "tvm::merge_inplace": frozenset({"v", "s"}),
}


def load_kernel(path: Path, function: str) -> Callable[..., Any]:
    """The kernel called `function` in the library at `path`; Skip where it cannot be had."""
    module = _module(path)
    try:
        if module.implements_function(function, True):
            kernel: Callable[..., Any] = module.get_function(function, True)
            return kernel
    except Exception as error:  # one for another device, say
        raise Skip(f"its library does not give '{function}': {str(error).splitlines()[0][:100]}") from None
    raise Skip(f"its library has no kernel called '{function}'")


@cache
def _module(path: Path) -> Any:
    try:
        import tvm  # noqa: F401 - registers how a library is read
        import tvm_ffi

        return tvm_ffi.load_module(str(path))
    except ImportError:
        raise Skip(INSTALL) from None
    except Exception as error:
        raise Skip(f"its library does not load: {str(error).splitlines()[0][:100]}") from None


def parameters_of(call: Call) -> Parameters:
    """What `call` gives, and which of it the kernel writes."""
    names = [argument.name or f"arg{position}" for position, argument in enumerate(call.args)]
    written = WRITTEN.get(base_of(call.operator), frozenset({"output", "lse"} & {*names} or names[-1:]))
    return Parameters([Parameter(name, Alias(True) if name in written else None) for name in names])

"""A function of a library in a Recording, run alone: one of a tvm-ffi module, or a kernel of a Relax VM's library, for
which no VM and no cache is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kcap.errors import first_line
from kcap.replay.rebuild.operators import Alias, Parameter, Parameters
from kcap.schemas.derive.bound_call import ReplayRule, Skip
from kcap.schemas.derive.families import REFUSALS, recognize
from kcap.schemas.derive.invocation import argument_names, invocation_of
from kcap.schemas.recording.operators import base_of, is_module_function
from kcap.schemas.recording.records import Call

WRITTEN: Mapping[str, frozenset[str]] = {  # of the paged cache's kernels; a VM's others write their last argument
    "tvm::transpose_append_mha": frozenset({"pages"}),
    "tvm::transpose_append_mla": frozenset({"pages"}),
    "tvm::split_rotary": frozenset({"q", "k", "v"}),
    "tvm::merge_inplace": frozenset({"v", "s"}),
}


def load_function(path: Path, name: str, of_vm: bool) -> Callable[..., Any]:
    """The function called `name` in the library at `path`; Skip where it cannot be had. `of_vm`: TVM compiled it."""
    module = _module(path, of_vm)
    try:
        if module.implements_function(name, True):
            function: Callable[..., Any] = module.get_function(name, True)
            return function
    except Exception as error:  # one for another device, say
        raise Skip(f"its library does not give '{name}': {first_line(error, 100)}") from None
    raise Skip(f"its library has no function called '{name}'")


@cache
def _module(path: Path, of_vm: bool) -> Any:
    try:
        if of_vm:
            import tvm  # noqa: F401 - registers how a library is read
        import tvm_ffi

        return tvm_ffi.load_module(str(path))
    except ImportError:
        package = "apache-tvm" if of_vm else "apache-tvm-ffi"
        raise Skip(f"needs {package}: pip install {package}") from None
    except Exception as error:
        raise Skip(f"its library does not load: {first_line(error, 100)}") from None


def parameters_of(call: Call, rule: ReplayRule) -> Parameters:
    """What `call` gives, and which of it is written, as far as that is known."""
    names = argument_names(call)
    if is_module_function(call.operator):
        written = _outputs_of_family(call)
    else:
        written = WRITTEN.get(base_of(call.operator), frozenset({"output", "lse"} & {*names} or names[-1:]))
    aliases = [Alias(True) if name in written else None for name in names]
    return Parameters([Parameter(name, alias) for name, alias in zip(rule.named(names), aliases, strict=True)])


def _outputs_of_family(call: Call) -> frozenset[str]:
    """The arguments whose memory holds what its family calls outputs; empty without a family."""
    try:
        invocation = invocation_of(call)
        instance = recognize(invocation)
        outputs = [output.get() for output in instance.outputs.values()] if instance else []
    except REFUSALS:
        return frozenset()
    written = {_storage(output) for output in outputs if isinstance(output, torch.Tensor)}
    tensors = {name: value for name, value in invocation.arguments.items() if isinstance(value, torch.Tensor)}
    return frozenset(name for name, tensor in tensors.items() if _storage(tensor) in written)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

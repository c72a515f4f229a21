"""DeepGEMM: the functions of its extension and of its own modules, wherever the package exports them.

`deep_gemm::fp8_gemm_nt`. Settings take no tensor and launch nothing: such calls are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from kcap.capture.hooks.patching import namespace
from kcap.capture.taps.libraries.library import Calls, Function, LibraryTap, Listener, wrap

PACKAGE = "deep_gemm"
PACKAGES = (PACKAGE, "vllm.third_party.deep_gemm")
EXPORTING = (*PACKAGES, *(f"{package}.utils" for package in PACKAGES))
HELPERS = (".utils", ".testing")  # their Python functions are compositions of torch's operators
LEFT_OUT = ("_", "set_", "init")


def install(listener: Listener) -> LibraryTap:
    """Record DeepGEMM's calls from the import of the package, or of vLLM's copy of it, on."""
    return LibraryTap(PACKAGE, PACKAGES, listener, find)


def find(module: ModuleType, calls: Calls) -> Iterator[tuple[Any, str, Function]]:
    """The kernels that the module exports."""
    if module.__name__ not in EXPORTING:
        return
    for name, value in list(namespace(module).items()):
        if not name.startswith(LEFT_OUT) and _is_kernel(value, module):
            yield module, name, wrap(value, f"deep_gemm::{value.__name__}", calls)


def _is_kernel(value: Any, module: ModuleType) -> bool:
    if isinstance(value, FunctionType):
        package = next(package for package in PACKAGES if module.__name__.startswith(package))
        inside = value.__module__.removeprefix(package)
        return inside != value.__module__ and not inside.startswith(HELPERS)
    return isinstance(value, BuiltinFunctionType)

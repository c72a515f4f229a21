"""A recorded C++ kernel of inductor made runnable: compiled as inductor compiles it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kcap.replay.skip import Skip
from kcap.replay.triton_source import CompileError

KERNEL = re.compile(r"\bkernel\s*\(([^()]*)\)\s*\{")
PARAMETER = re.compile(r"(.+?)\s*\b(\w+)", re.DOTALL)


def signature(text: str) -> tuple[list[str], list[str]]:
    """Types and names of the parameters of `kernel`, the types as inductor's bindings take them."""
    found = KERNEL.search(text)
    if found is None:
        raise Skip("its source has no function kernel(…)")
    types, names = [], []
    for parameter in found[1].split(","):
        match = PARAMETER.fullmatch(" ".join(parameter.replace("__restrict__", "").split()))
        if match is None:
            raise Skip(f"its source has a parameter without a name: {parameter.strip()[:40]!r}")
        types.append(match[1])
        names.append(match[2])
    return types, names


def load(text: str, types: list[str]) -> Callable[..., Any]:
    """The compiled kernel; it takes tensors and numbers by position. CompileError: the compiler refused it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        run: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(types, text)
    except InvalidCxxCompiler:
        raise Skip("no C++ compiler was found here: install g++, or name one in the variable CXX") from None
    except CppCompileError as error:
        lines = str(error).splitlines()
        said = next((line for line in lines if " error: " in line), lines[0])
        raise CompileError(said.split(" error: ")[-1]) from None
    return run

"""Triton kernels of an installed package, run by Triton's interpreter on the CPU: what a reference has to agree with.

The package's own import may need a GPU. So the kernels are read from its source, and nothing else of it runs.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

HEAD = """import triton
import triton.language as tl

TRITON3 = True


@triton.jit
def exp(x):
    return tl.exp(x)


"""


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="kcap-interpreted-")


def kernels(package: str, *files: str) -> dict[str, Launcher]:
    """The functions decorated with `triton.jit` in these files of `package`; without it the test is skipped."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(spec.submodule_search_locations[0])
    text = HEAD + "\n\n".join(part for file in files for part in jitted(ast.parse((root / file).read_text())))
    return interpreted(f"interpreted_{abs(hash((package, files)))}", text)


def jitted(tree: ast.Module) -> Iterable[str]:
    """The text of each kernel and device function, those under `if` at the top among them (the first of a name)."""
    seen: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(decorator_name, node.decorator_list):
            if node.name not in seen:
                node.decorator_list = [one for one in node.decorator_list if decorator_name(one) != "triton.autotune"]
                yield ast.unparse(node)
            seen.add(node.name)


def decorator_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def interpreted(name: str, text: str) -> dict[str, Launcher]:
    """The functions of `text`, a module that Triton interprets."""
    file = Path(folder().name) / f"{name}.py"
    file.write_text(text)
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    with interpreter():
        module_spec.loader.exec_module(module)
    return {name: Launcher(value) for name, value in vars(module).items() if hasattr(value, "arg_names")}


@dataclass(frozen=True)
class Launcher:
    """A kernel that is launched as Triton's are: `kernel[grid](arguments)`."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with interpreter():
                self.kernel[grid](*args, **kwargs)

        return launch


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton as it would be, had it been imported to interpret."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder
    from triton.runtime.jit import JITFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(InterpreterBuilder, "create_splat", splat)
        for module in (tl, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        yield


def splat(_: Any, block: Any, scalar: Any) -> Any:
    """A scalar as a block. Triton 3.9's own makes integers of a comparison's result, which no mask may be."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    value = scalar.data.reshape(-1)[0]
    return TensorHandle(np.full(block.shape, value, dtype=scalar.data.dtype), scalar.dtype.scalar)

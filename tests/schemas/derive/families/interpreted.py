"""Triton kernels of an installed package, run by Triton's interpreter on the CPU: what a reference has to agree with.

The package's own import may need a GPU. So the kernels are read from its source, and nothing else of it runs: SGLang's
from its environment, beside which this Triton is another's.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
SGLANG_PYTHON = Path(os.environ.get("KCAP_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))

HEAD = """import triton
import triton.language as tl

TRITON3 = True


@triton.jit
def exp(x):
    return tl.exp(x)


class BlockPointer:  # what tl.make_block_ptr makes, which Triton 3.9 no longer has, of one or two dimensions
    def __init__(self, base, shape, strides, offsets, block_shape, order):
        self.dtype, steps = base.dtype, [tl.arange(0, size) + start for size, start in zip(block_shape, offsets)]
        steps = steps if len(steps) == 1 else [steps[0][:, None], steps[1][None, :]]
        self.address, self.mask = base, True
        for step, length, stride in zip(steps, shape, strides):
            self.address, self.mask = self.address + step * stride, (step >= 0) & (step < length) & self.mask


def load(pointer, *args, boundary_check=(), **kwargs):
    if isinstance(pointer, BlockPointer):
        return tl.load(pointer.address, mask=pointer.mask, other=0.0)
    return tl.load(pointer, *args, **kwargs)


def store(pointer, value, *args, boundary_check=(), **kwargs):
    if isinstance(pointer, BlockPointer):
        return tl.store(pointer.address, value, mask=pointer.mask)
    return tl.store(pointer, value, *args, **kwargs)


"""
LAUNCHERS = {"triton.autotune", "cached_triton_kernel"}  # decorators that say how a kernel is launched, SGLang's too
REPLACED = {"make_block_ptr": "BlockPointer", "load": "load", "store": "store"}  # of tl, where block pointers are


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="kcap-interpreted-")


def kernels(package: str, *files: str, head: str = "") -> dict[str, Launcher]:
    """The functions decorated with `triton.jit` in these files of `package`; without it the test is skipped.

    `head`: constants of these files that they take as defaults.
    """
    pytest.importorskip("triton")
    root = folder_of(package)
    if root is None:
        pytest.skip(f"{package} is not installed")
    trees = [ast.parse((root / file).read_text()) for file in files]
    text = "\n\n".join([HEAD + head, *(part for tree in trees for part in jitted(tree))])
    return interpreted(f"interpreted_{abs(hash((package, files, head)))}", text)


def folder_of(package: str) -> Path | None:
    """Where its source is: in this environment or in SGLang's."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return next(SGLANG_PYTHON.parents[1].glob(f"lib/python3.*/site-packages/{package}"), None)


def jitted(tree: ast.Module) -> Iterable[str]:
    """The text of each kernel and device function, those under `if` at the top among them (the first of a name)."""
    seen: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(decorator_name, node.decorator_list):
            if node.name not in seen:
                node.decorator_list = [one for one in node.decorator_list if decorator_name(one) not in LAUNCHERS]
                if "make_block_ptr" in ast.dump(node):
                    node = BlockPointers().visit(node)
                yield ast.unparse(ast.fix_missing_locations(NumbersAsTensors().visit(node)))
            seen.add(node.name)


class NumbersAsTensors(ast.NodeTransformer):
    """Makes what is converted (`name.to(dtype)`) a tensor, as counters and constants are in a compiled kernel."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr == "to" and isinstance(node.value, ast.Name):
            node.value = ast.parse(f"tl.core.to_tensor({node.value.id})", mode="eval").body
        return node


class BlockPointers(ast.NodeTransformer):
    """Has a kernel make, read and write block pointers by the functions of HEAD."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "tl" and node.attr in REPLACED:
            return ast.Name(REPLACED[node.attr], ast.Load())
        return node


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
    """A kernel that is launched as Triton's are: `kernel[grid](arguments)`. `tf32`: as on a GPU, whose tensor cores
    read the upper 19 bits of float32."""

    kernel: Any
    tf32: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with interpreter(self.tf32):
                self.kernel[grid](*args, **kwargs)

        return launch


@contextmanager
def interpreter(tf32: bool = False) -> Iterator[None]:
    """Triton as it would be, had it been imported to interpret."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder
    from triton.runtime.jit import JITFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(InterpreterBuilder, "create_splat", splat)
        patch.setattr(InterpreterBuilder, "cast_impl", cast(InterpreterBuilder.cast_impl))
        patch.setattr(InterpreterBuilder, "create_fp_to_fp", cast(InterpreterBuilder.create_fp_to_fp))
        if tf32:
            patch.setattr(InterpreterBuilder, "create_dot", in_tf32(InterpreterBuilder.create_dot))
        for operation in ("create_dot", "binary_op"):
            patch.setattr(InterpreterBuilder, operation, in_float32(getattr(InterpreterBuilder, operation)))
        for module in (tl, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        yield


def cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion to bfloat16 that rounds to the nearest, as a GPU does. Triton 3.9's own cuts the last bits off."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def convert(builder: Any, source: Any, target: Any, *rounding: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(builder, source, target, *rounding)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    return convert


def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that computes with bfloat16. Triton 3.9's own takes their bits for integers."""
    import triton.language as tl

    @wraps(original)
    def operate(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
            return original(builder, left, right, *others)
        wide = original(builder, *(builder.cast_impl(side, tl.float32) for side in (left, right)), *others)
        return wide if original.__name__ == "create_dot" else builder.cast_impl(wide, tl.bfloat16)

    return operate


def in_tf32(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Products of float32 as tensor cores make them, unless a kernel asks for better ones."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.runtime.interpreter import TensorHandle

    @wraps(dot)
    def product(builder: Any, left: Any, right: Any, sums: Any, precision: Any, *others: Any) -> Any:
        if left.dtype.scalar == tl.float32 and precision == INPUT_PRECISION.TF32:
            kept = (side.data.view(np.uint32) & np.uint32(0xFFFFE000) for side in (left, right))
            left, right = (TensorHandle(bits.view(np.float32), tl.float32) for bits in kept)
        return dot(builder, left, right, sums, precision, *others)

    return product


def splat(_: Any, block: Any, scalar: Any) -> Any:
    """A scalar as a block. Triton 3.9's own makes integers of a comparison's result, which no mask may be."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    value = scalar.data.reshape(-1)[0]
    return TensorHandle(np.full(block.shape, value, dtype=scalar.data.dtype), scalar.dtype.scalar)

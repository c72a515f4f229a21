"""A recorded Triton kernel made runnable: its text imported from a private file, launched as it was."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kcap.replay.launch_values import python_value
from kcap.replay.skip import Skip
from kcap.schemas.recording import Launch
from kcap.schemas.values import Value

INTERPRETED = "interpreted, not compiled (TRITON_INTERPRET)"
NEEDS_GPU = "a Triton kernel needs a GPU (TRITON_INTERPRET=1 interprets it on the CPU, slowly)"
INSTALL = "Triton is not installed: pip install triton"


class CompileError(Exception):
    """The compiler refused a recorded source; the message is its own, in one line."""


@cache
def folder() -> TemporaryDirectory[str]:
    """Where the texts lie while this process runs: Triton reads a kernel's source from its file."""
    return TemporaryDirectory(prefix="kcap-kernels-")


def load(text: str, function: str) -> Any:
    """The kernel called `function` in `text`; Skip where a library that it imports is absent."""
    name = f"kcap_kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = Path(folder().name) / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        root = (error.name or "").split(".")[0]
        raise Skip(INSTALL if root == "triton" else f"its source needs {root}: pip install {root}") from None
    kernel = getattr(module, function, None)
    if not hasattr(kernel, "arg_names"):
        raise Skip(f"its source has no Triton kernel called '{function}'")
    return kernel


def interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def check_device(kernel: Any, device: str) -> None:
    """Skip where Triton compiles nothing for `device`."""
    from triton.backends import backends

    if device == "cpu" and "cpu" not in backends and not interpreted(kernel):
        raise Skip(NEEDS_GPU)


def launcher(kernel: Any, launch: Launch, names: list[str]) -> Callable[..., None]:
    """What launches `kernel` as `launch` says, given its run-time arguments in the order of `names`."""
    if not 1 <= len(launch.grid) <= 3:
        raise Skip("its grid was not recorded")
    fixed = {name: python_value(value, name) for name, value in launch.constexprs.items()}
    tuning = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options = {name: plain(value, name) for name, value in {**launch.options, **tuning}.items() if value is not None}
    run = kernel[tuple(launch.grid)]

    def call(*args: Any, **named: Any) -> None:
        given = {name: tuple(v) if type(v) is list else v for name, v in zip(names, args, strict=False)}
        try:
            run(**given, **named, **fixed, **options)
        except Exception as error:
            if type(error).__module__.startswith("triton.compiler"):
                raise CompileError(reason(error)) from error
            raise

    return call


def plain(value: Value, name: str) -> Any:
    """An option of the compiler; those that name files (`extern_libs`) are lists, and refused."""
    if not isinstance(value, bool | int | float | str):
        raise Skip(f"its option '{name}' is none that is passed to the compiler")
    return value


def reason(error: Exception) -> str:
    """The compiler's own words in one line: Triton puts the place and the source before them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[-1]}" if lines[0].startswith("at ") and len(lines) > 1 else lines[0]

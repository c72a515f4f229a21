"""Kernels with a source in the Recording (Triton, inductor): the callable, and valid arguments for it.

A source runs only if the Recording's seal holds or the user trusts it, and never if its content does not match the hash
in its name. Triton's is imported from a private file and launched as recorded; inductor's C++ is compiled as inductor
compiles it; a library of TVM, or of a tvm-ffi module, is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, TypeVar

import torch

from kcap.errors import FormatError
from kcap.replay.rebuild.memory import compact_shape
from kcap.replay.rebuild.operators import Operator, Parameters
from kcap.replay.rebuild.tvm_library import load_function, parameters_of
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.derive.families import ReplayRule, replay_rule_for
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.operators import SOURCES, base_of, is_module_function
from kcap.schemas.recording.recording import Call, Launch, Recording
from kcap.schemas.recording.seal import holds
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec, TorchConstant, Value

Content = TypeVar("Content")
UNTRUSTED = "its kernel sources come from elsewhere, or have no seal: look at them in kernels/, then pass --trust"
NO_SOURCE = "its source is not there (a trace file holds none): replay the Recording that it comes from"
ZEROED_PREFIXES = ("ws_ptr", "sem_ptr")  # inductor's workspaces and semaphores: zero when a kernel starts
WRITTEN_PREFIXES = ("in_out_ptr", "out_ptr", *ZEROED_PREFIXES)


def is_launch(call: Call) -> bool:
    """Whether `call` is a kernel with a source of its own, by its launch or by its namespace."""
    return call.launch is not None or call.namespace in SOURCES


def may_be_address(value: Value) -> bool:
    return isinstance(value, int) and value >= 1 << 32


class Launches:
    """The kernels of one Recording; each source is compiled once. `trusted`: the user passed --trust."""

    def __init__(self, recording: Recording | None, trusted: bool) -> None:
        self.recording = recording
        self.trusted = trusted
        self.loaded: dict[Hashable, Any] = {}

    @cached_property
    def allowed(self) -> bool:
        if self.trusted or self.recording is None:
            return self.trusted
        folder = self.recording.path / "kernels"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return holds(self.recording.metadata.seal, names)

    def resolve_launch(self, call: Call, device: str) -> tuple[Operator, ReplayRule]:
        """The operator that runs `call` on `device`, and its rule; Skip says why there is none."""
        launch = call.launch
        if launch is None or self.recording is None:
            raise Skip(NO_SOURCE)
        if launch.language != call.namespace:
            raise Skip(f"its name is not that of a kernel in {launch.language}")
        if launch.language == "tvm":
            path, of_vm = self._checked(self.recording.library, launch), not is_module_function(call.operator)
            run = self.load(launch, lambda: load_function(path, launch.function, of_vm))
            rule = replay_rule_for(base_of(call.operator))
            if not of_vm and not rule.unnamed_args and any(may_be_address(argument.value) for argument in call.args):
                raise Skip("a number among its arguments may be an address")
            return Operator(call.operator, run, parameters_of(call, rule)), rule
        text = self._checked(self.recording.source, launch)
        kernel = self.cpp(call, launch, text) if launch.language == "cpp" else self.triton(call, launch, text, device)
        inductor = launch.language == "cpp" or is_inductor_made(text, kernel.parameters)
        written = {name for name in kernel.parameters if inductor and name.startswith(WRITTEN_PREFIXES)}
        schema = Parameters.of(kernel.parameters, written)
        return Operator(call.operator, kernel.run, schema, kernel.notes), rule_of(call, text, inductor)

    def _checked(self, read: Callable[[Launch], Content], launch: Launch) -> Content:
        """What `read` gives of its source, if it may run."""
        if launch.kernel is None:
            raise Skip(launch.unread or "its source was not read when it was recorded")
        if not self.allowed:
            raise Skip(UNTRUSTED)
        try:
            return read(launch)
        except FormatError as error:
            raise Skip(error.reason) from None

    def triton(self, call: Call, launch: Launch, text: str, device: str) -> RunnableKernel:
        kernel = self.load(launch, lambda: specialized(load_triton(text, launch.function), launch))
        check_triton_device(kernel, device)
        parameters = [name for name in kernel.arg_names if name not in launch.constexprs]
        notes = [INTERPRETED_NOTE] if is_interpreted(kernel) else []
        run = triton_launcher(kernel, launch, argument_names(call, parameters))
        return RunnableKernel(run, parameters, notes)

    def cpp(self, call: Call, launch: Launch, text: str) -> RunnableKernel:
        types, parameters = cpp_signature(text)
        if len(argument_names(call, parameters)) < len(parameters):
            raise Skip(f"its source takes {len(parameters)} arguments, {len(call.args)} were recorded")
        return RunnableKernel(self.load(launch, lambda: load_cpp(text, types)), parameters)

    def load(self, launch: Launch, compile_source: Callable[[], Any]) -> Any:
        """The compiled source of `launch`; each is compiled once."""
        key = launch.kernel, launch.function, *sorted(launch.types.items()), *launch.unspecialized
        if key not in self.loaded:
            self.loaded[key] = compile_source()
        return self.loaded[key]


def argument_names(call: Call, parameters: list[str]) -> list[str]:
    """The parameter of each argument: by its recorded name, else by its position."""
    if len(call.args) > len(parameters):
        raise Skip(f"its source takes {len(parameters)} arguments, {len(call.args)} were recorded")
    return [argument.name or name for argument, name in zip(call.args, parameters, strict=False)]


class InductorRule(ReplayRule):
    """Integer tensors that were not recorded: the kernel `text` asserts how far they index; others get zeros."""

    def __init__(self, text: str) -> None:
        self.text = text

    def prepare(self, bound: BoundCall) -> None:
        limit = least_index_bound(self.text, bound)
        for path, spec in bound.integers():
            name = bound.holder(path).name or ""
            if name.startswith(ZEROED_PREFIXES):
                bound.contents[path] = torch.zeros(compact_shape(spec), dtype=torch.int64)
            elif path not in bound.contents and spec.numel:
                bound.contents[path] = draw_below(spec, limit, bound.ranges.get(path))


def launch_rule(call: Call, recording: Recording | None) -> ReplayRule:
    """The rule of a kernel with a source of its own, which is read and not run; Skip if there is no source."""
    if call.launch is None or recording is None:
        raise Skip(NO_SOURCE)
    if call.launch.language == "tvm":
        return replay_rule_for(base_of(call.operator))
    text = recording.source(call.launch) if call.launch.kernel else ""
    inductor = call.launch.language == "cpp" or is_inductor_made(text, [a.name or "" for a in call.args])
    return rule_of(call, text, inductor)


def rule_of(call: Call, text: str, inductor: bool) -> ReplayRule:
    """Inductor's, or that of the kernel's family, by its name without the source's id."""
    return InductorRule(text) if inductor else replay_rule_for(base_of(call.operator))


def draw_below(spec: TensorSpec, limit: int, recorded: tuple[int, int] | None) -> torch.Tensor:
    """Numbers from 0 to below `limit`, and within the recorded range if there is one."""
    highest = min(limit, 1 << (spec.bits - 1)) - 1
    low, high = recorded or (0, highest)
    low, high = min(max(low, 0), highest), min(max(high, 0), highest)
    return torch.randint(low, max(low, high) + 1, compact_shape(spec))


# inductor asserts `(0 <= tmp) & (tmp < N)`, in Triton and in C++ with the same text; N may be a size such as ks0.
INDEX_ASSERTION = re.compile(r"index out of bounds: (?:0 <= )?[^<\"']+ < ([^<\"']+)[\"']")
POINTER_PARAMETER = re.compile(r"(in|out|in_out)_ptr\d+")
NUMEL_PARAMETER = re.compile(r"[xyzr]\d*_?numel(_\d+)?")  # of a combination of kernels, each has its own


@dataclass(frozen=True)
class RunnableKernel:
    """A callable kernel, the names of its run-time parameters in order, and notes for its measurements."""

    run: Callable[..., Any]
    parameters: list[str]
    notes: Sequence[str] = ()


def is_inductor_made(text: str, parameters: list[str]) -> bool:
    """Whether inductor wrote this Triton kernel, which asserts its indices or knows that they are valid."""
    named = any(map(POINTER_PARAMETER.fullmatch, parameters)) and any(map(NUMEL_PARAMETER.fullmatch, parameters))
    return "triton_helpers" in text or named


def least_index_bound(text: str, bound: BoundCall) -> int:
    """The smallest bound that `text` asserts of an index; 1 if it asserts none: zero is always valid."""
    limits = [_bound_number(limit.strip(), bound) for limit in INDEX_ASSERTION.findall(text)]
    return max(min(limits, default=1), 1)


def _bound_number(limit: str, bound: BoundCall) -> int:
    digits = limit.removesuffix("L")
    value = int(digits) if digits.isdecimal() else bound[limit]
    return value if isinstance(value, int) else 1


def constant_value(value: Value, name: str) -> Any:
    """The Python value of a constexpr or an option; Skip where the Value does not hold it."""
    match value:
        case list():
            return tuple(constant_value(item, name) for item in value)
        case TorchConstant(kind="triton"):
            return triton_dtype(value.name)
        case TorchConstant(kind="dtype"):
            return torch_dtype(value.name, Skip)
        case Opaque(type=kind):
            raise Skip(f"its constant '{name}' is opaque ({kind})")
        case TorchConstant() | TensorSpec() | Drift() | Folded():
            raise Skip(f"its constant '{name}' has no fixed value")
    return value


def triton_dtype(name: str) -> Any:
    """Triton's dtype of this name; Skip if this Triton has none."""
    import triton.language as tl

    try:
        return tl.dtype(name)
    except (AssertionError, RuntimeError, ValueError):
        raise Skip(f"this Triton has no dtype {name[:40]}") from None


INTERPRETED_NOTE = "interpreted, not compiled (TRITON_INTERPRET)"
NEEDS_GPU = "a Triton kernel needs a GPU (TRITON_INTERPRET=1 interprets it on the CPU, slowly)"
INSTALL_TRITON = "Triton is not installed: pip install triton"


class CompileError(Exception):
    """The compiler refused a recorded source; the message is the compiler's, in one line."""


@cache
def source_folder() -> TemporaryDirectory[str]:
    """The folder of the sources while this process runs: Triton reads a kernel's source from its file."""
    return TemporaryDirectory(prefix="kcap-kernels-")


def load_triton(text: str, function: str) -> Any:
    """The kernel called `function` in `text`; Skip where a library that it imports is missing."""
    name = f"kcap_kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = Path(source_folder().name) / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        root = (error.name or "").split(".")[0]
        raise Skip(INSTALL_TRITON if root == "triton" else f"its source needs {root}: pip install {root}") from None
    kernel = getattr(module, function, None)
    if not hasattr(kernel, "arg_names"):
        raise Skip(f"its source has no Triton kernel called '{function}'")
    return kernel


def specialized(kernel: Any, launch: Launch) -> Any:
    """`kernel`, compiled for the types of `launch`, and without knowledge of its unspecialized parameters."""
    if is_interpreted(kernel) or not (launch.types or launch.unspecialized):
        return kernel
    import triton

    function = FunctionType(kernel.fn.__code__, kernel.fn.__globals__, kernel.fn.__name__, kernel.fn.__defaults__)
    function.__annotations__ = {**kernel.fn.__annotations__, **launch.types}
    function.__module__ = kernel.fn.__module__
    return triton.jit(function, do_not_specialize=launch.unspecialized)


def is_interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def check_triton_device(kernel: Any, device: str) -> None:
    """Skip where Triton cannot compile for `device`."""
    from triton.backends import backends

    if device == "cpu" and "cpu" not in backends and not is_interpreted(kernel):
        raise Skip(NEEDS_GPU)


def triton_launcher(kernel: Any, launch: Launch, names: list[str]) -> Callable[..., None]:
    """A function that launches `kernel` as recorded; it takes the run-time arguments in the order of `names`."""
    if not 1 <= len(launch.grid) <= 3:
        raise Skip("its grid was not recorded")
    constexprs = {name: constant_value(value, name) for name, value in launch.constexprs.items()}
    tuning = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options = {
        name: compiler_option(value, name) for name, value in {**launch.options, **tuning}.items() if value is not None
    }
    run = kernel[tuple(launch.grid)]

    def call(*args: Any, **named: Any) -> None:
        arguments = {name: with_tuples(v) for name, v in zip(names, args, strict=False)}
        try:
            run(**arguments, **named, **constexprs, **options)
        except Exception as error:
            if type(error).__module__.startswith("triton.compiler"):
                raise CompileError(compiler_message(error)) from error
            raise

    return call


def with_tuples(value: Any) -> Any:
    """`value`, its lists as tuples, which Triton takes; tuples of them too."""
    return tuple(with_tuples(item) for item in value) if type(value) is list else value


def compiler_option(value: Value, name: str) -> Any:
    """An option of the compiler; lists are refused, for they name files (`extern_libs`)."""
    if not isinstance(value, bool | int | float | str):
        raise Skip(f"its option '{name}' is none that is passed to the compiler")
    return value


def compiler_message(error: Exception) -> str:
    """The compiler's message in one line: Triton puts the location and the source before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[-1]}" if lines[0].startswith("at ") and len(lines) > 1 else lines[0]


CPP_KERNEL = re.compile(r"\bkernel\s*\(([^()]*)\)\s*\{")
CPP_PARAMETER = re.compile(r"(.+?)\s*\b(\w+)", re.DOTALL)


def cpp_signature(text: str) -> tuple[list[str], list[str]]:
    """Types and names of the parameters of the function `kernel`, the types as inductor's bindings take them."""
    kernel = CPP_KERNEL.search(text)
    if kernel is None:
        raise Skip("its source has no function kernel(…)")
    types, names = [], []
    for parameter in kernel[1].split(","):
        match = CPP_PARAMETER.fullmatch(" ".join(parameter.replace("__restrict__", "").split()))
        if match is None:
            raise Skip(f"its source has a parameter without a name: {parameter.strip()[:40]!r}")
        types.append(match[1])
        names.append(match[2])
    return types, names


def load_cpp(text: str, types: list[str]) -> Callable[..., Any]:
    """The compiled kernel; it takes tensors and numbers by position. CompileError: the compiler refused it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        run: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(types, text)
    except InvalidCxxCompiler:
        raise Skip("no C++ compiler was found here: install g++, or name one in the variable CXX") from None
    except CppCompileError as error:
        lines = str(error).splitlines()
        message = next((line for line in lines if " error: " in line), lines[0])
        raise CompileError(message.split(" error: ")[-1]) from None
    return run

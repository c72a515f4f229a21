"""Inductor: the launches of its Triton kernels, and the calls of its C++ kernels on the CPU."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.taps.external import MOST_LAUNCHES, Externals, contained
from kcap.capture.taps.kernels.fragments import Annotations, bound_in, fragment_of
from kcap.capture.taps.kernels.launches import (
    ABSENT,
    CompiledKernels,
    Launches,
    Specialization,
    keep_fragment,
    picker,
    untold_text,
)

NOTHING = -2  # in the place of a launch: a grid of no blocks, which launches nothing


class Inductor(CompiledKernels):
    """Wraps the launcher of inductor's Triton kernels."""

    name = "inductor"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.launches = Launches(listener)
        self._hooked = False
        self._tuned = ByIdentity[_Tuned]()  # by the autotuner
        self._annotations = Annotations("torch._inductor.codegen.triton", "TritonScheduling")

    def _hook_all(self) -> None:
        self._methods.when_imported("torch._inductor.runtime.triton_heuristics", self._hook)
        self._annotations.install()

    @contained
    def _hook(self, module: ModuleType) -> None:
        self._methods.replace(module.CachingAutotuner, "run", self._running)
        for tuning in ("autotune_to_one_config", "coordinate_descent_tuning"):
            self._methods.around(module.CachingAutotuner, tuning, self._ignored)
        self._hooked = True

    def uninstall(self) -> None:
        super().uninstall()
        self._annotations.uninstall()

    def _health(self) -> tuple[str, str]:
        if not self._hooked:
            return "absent", "inductor compiled nothing"
        status, detail = self.launches.health()
        return status, f"{detail}{self._annotations.trouble}"

    def _running(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`CachingAutotuner.run`, around `original`."""

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            seen = self.on and self.listener.listening and not kwargs.get("benchmark_run")
            if not seen or getattr(tuner, "triton_interpret", False):
                return original(tuner, *args, **kwargs)  # interpreted, it launches as anybody's Triton
            if len(tuner.launchers) == 1:
                self._launched(tuner, args)
                return original(tuner, *args, **kwargs)
            result = original(tuner, *args, **kwargs)  # which picks the configuration first
            self._launched(tuner, args)
            return result

        return run

    @contained
    def _launched(self, tuner: Any, args: tuple[Any, ...]) -> None:
        tuned = self._tuned.get(tuner)
        if tuned is None or not tuned.is_of(tuner):
            tuned = self._tuned[tuner] = _Tuned(tuner, len(args), self.launches)
        launch = tuned.launch(args, self.launches)
        if launch is not None and launch != NOTHING:
            self.listener.launched(tuned.kernel.operator, launch, tuned.own(args))


class _Tuned:
    """An autotuner of inductor's that has chosen its configuration: its kernel, and the launches seen, by the numbers
    among their `given` arguments."""

    def __init__(self, tuner: Any, given: int, launches: Launches) -> None:
        self.names = given_names(tuner)
        if len(self.names) != given:
            raise ValueError(f"{tuner.fn.__name__} takes {self.names}, and was given {given} arguments")
        constants = _constants(tuner)
        absent = {name for name, value in constants.items() if value is None}
        extra = len(tuner.inductor_meta.get("extra_launcher_args", ()))
        own = [i for i, name in enumerate(self.names[: given - extra]) if name not in absent]
        parameters = [self.names[i] for i in own]
        fixed = [name for name in tuner.fn.arg_names if name not in parameters]
        self.own = picker(own)
        self.kernel = launches.kernel(tuner.fn, lambda: (parameters, fixed), lambda: _fragment(tuner))
        (self._launcher,) = tuner.launchers
        config = self._launcher.config
        constants |= config.kwargs
        self._grid = _grid(tuner, config)
        self._constexprs = [constants.get(name, ABSENT) for name in self.kernel.constexprs]
        self._compiled = config.num_warps, config.num_stages, _options(tuner), _specialization(tuner, parameters)
        self._launches: dict[tuple[int, ...], int | None] = {}

    def is_of(self, tuner: Any) -> bool:
        """Whether `tuner` is tuned now as it was."""
        return self._launcher is tuner.launchers[0]

    def launch(self, args: tuple[Any, ...], launches: Launches) -> int | None:
        """The number of the launch with these arguments; NOTHING, or None where there are too many."""
        numbers = tuple([value for value in args if isinstance(value, int)])
        try:
            launch = self._launches[numbers]
        except KeyError:
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
            grid = self._grid(dict(zip(self.names, args, strict=True)))
            launch = NOTHING if 0 in grid else launches.launch(self.kernel, grid, self._constexprs, *self._compiled)
            self._launches[numbers] = launch
        else:
            launches.lost += launch is None
        return launch


def _fragment(tuner: Any) -> str | None:
    """What the generated code that runs `tuner` says of it."""
    binding = bound_in(sys._getframe(1), tuner)
    return fragment_of(*binding) if binding else None


def given_names(tuner: Any) -> list[str]:
    """The names of what generated code passes: every parameter but the constexprs, then what only the grid needs."""
    fixed = set(getattr(tuner.fn, "constexprs", ()))
    names = [name for index, name in enumerate(tuner.fn.arg_names) if index not in fixed]
    return [*names, *tuner.inductor_meta.get("extra_launcher_args", ())]


def _constants(tuner: Any) -> dict[str, Any]:
    """What the kernel was specialized on, by the names of its parameters."""
    names = tuner.fn.arg_names
    constants = {}
    for key, value in tuner.triton_meta.get("constants", {}).items():
        index = key[0] if isinstance(key, tuple) else key
        constants[names[index] if isinstance(index, int) else index] = value
    return constants


META_OPTIONS = ("enable_fp_fusion", "launch_cooperative_grid", "launch_pdl")  # inductor has them in its metadata


def _options(tuner: Any) -> dict[str, Any]:
    """The options that inductor compiles with, where Triton's default may differ: indices are asserted with `debug`."""
    asserts = tuner.inductor_meta.get("assert_indirect_indexing", True) and not tuner.inductor_meta.get("is_hip")
    options = {"debug": True, "sanitize_overflow": False} if asserts else {}
    return options | {name: tuner.triton_meta[name] for name in META_OPTIONS if name in tuner.triton_meta}


WIDE_TYPES = ("i64", "fp64")  # Triton takes the narrower one where the value fits


def _specialization(tuner: Any, parameters: list[str]) -> Specialization:
    """Inductor tells the types of sizes, and what 16 divides; Triton would see both in the values."""
    signature, configs = tuner.triton_meta.get("signature", {}), tuner.triton_meta.get("configs")
    kinds = {name: str(signature.get(name, "")) for name in parameters}
    types = tuple((name, kind) for name, kind in kinds.items() if kind in WIDE_TYPES)
    if not configs or not isinstance(configs[0], dict):
        return Specialization(types)
    names = tuner.fn.arg_names
    divisible = {names[key[0]] for key, marks in configs[0].items() if ["tt.divisibility", 16] in marks}
    free = (name for name, kind in kinds.items() if kind.startswith(("*", "i")) and name not in divisible)
    return Specialization(types, tuple(free))


def _grid(tuner: Any, config: Any) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """What gives the grid for arguments by name, from the same expressions as `GridExpr.eval_slow`, compiled once."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(tuner.inductor_meta, config)
    lines = [*grid.prefix, f"grid = {grid.x_grid}, {grid.y_grid}, {grid.z_grid}"]
    code = compile("\n".join(lines), "<grid>", "exec")

    def at(arguments: dict[str, Any]) -> tuple[int, ...]:
        exec(code, arguments)
        found: tuple[int, ...] = arguments["grid"]
        return found

    return at


MARK = "__kcap_cpp__"  # on what stands for a kernel: its tap, the kernel, its source


SIGNATURE = re.compile(r'extern "C"[^(]*?\bkernel\s*\(([^)]*)\)')


class InductorCpp(CompiledKernels):
    """Wraps what binds inductor's C++ kernels (of the CPU) to generated code, and what is bound there already."""

    name = "inductor_cpp"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.kernels = self.lost = self.untold = 0
        self._annotations = Annotations("torch._inductor.codegen.cpp", "CppScheduling")
        self._rebound: list[tuple[ModuleType, str, Any, Any]] = []

    def _hook_all(self) -> None:
        self._methods.when_imported("torch._inductor.async_compile", self._hook)
        self._annotations.install()

    @contained
    def _hook(self, module: ModuleType) -> None:
        self._methods.around(module.AsyncCompile, "cpp_pybinding", self._bind)

    def uninstall(self) -> None:
        super().uninstall()
        self._annotations.uninstall()
        for module, name, seen, bound in self._rebound:
            if vars(module).get(name) is seen:
                setattr(module, name, bound)
        self._rebound.clear()

    @contained
    def refresh(self) -> None:
        """Look for the kernels that were bound before this tap was there."""
        cache = sys.modules.get("torch._inductor.codecache")
        for module in list(cache.PyCodeCache.modules) if cache else ():
            for name, value in list(vars(module).items()):
                if _is_kernel(value) and getattr(value, MARK, (None,))[0] is not self:
                    self._rebind(module, name, value)

    def _rebind(self, module: ModuleType, name: str, value: Any) -> None:
        _, function, source = getattr(value, MARK, (None, value, None))
        seen = self._seen(function, source or _source_in(module, name))
        self._rebound.append((module, name, seen, value))
        setattr(module, name, seen)

    def _health(self) -> tuple[str, str]:
        if self.lost:
            return "off", f"{self.lost} calls of kernels that were compiled before recording began are not recorded"
        if not self.kernels:
            return "absent", "inductor compiled no C++ kernel"
        return "ok", f"{self.kernels} kernels{untold_text(self.untold)}{self._annotations.trouble}"

    def _bind(self, original: Callable[..., Any], compiler: Any, argtypes: list[str], source: str) -> Any:
        from torch._inductor.codecache import LambdaFuture

        bound = original(compiler, argtypes, source)
        if hasattr(bound, "result"):  # compiled in the background
            return LambdaFuture(lambda: self._seen(bound.result(), source))
        return self._seen(bound, source)

    def _seen(self, function: Callable[..., Any], source: str | None) -> Callable[..., Any]:
        kernel = None if source is None else _CppKernel(source)
        self.kernels += 1

        def run(*args: Any) -> Any:
            if self.on and self.listener.listening:
                if kernel is None:
                    self.lost += 1
                else:
                    if kernel.name is None:
                        self._bound(kernel, run, sys._getframe(1))
                    self._launched(kernel, args)
            return function(*args)

        setattr(run, MARK, (self, function, source))
        return run

    @contained
    def _bound(self, kernel: _CppKernel, run: Callable[..., Any], caller: FrameType) -> None:
        self.untold += not kernel.bound(bound_in(caller, run))

    @contained
    def _launched(self, kernel: _CppKernel, args: tuple[Any, ...]) -> None:
        operator, launch = kernel.numbers(self.listener)
        if launch is not None:
            self.listener.launched(operator, launch, args)


class _CppKernel:
    """A C++ kernel by its source; numbered when it is first called, by the name that generated code gave it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: tuple[int, int | None] | None = None
        self.name: str | None = None
        self._fragment: str | None = None

    def bound(self, binding: tuple[Mapping[str, Any], str] | None) -> bool:
        """Take the name, and what the generated code that binds the kernel there says of it: whether it does."""
        self.name = _human_name(binding[1]) if binding else "fused"
        self._fragment = fragment_of(*binding) if binding else None
        return self._fragment is not None

    def numbers(self, listener: Externals) -> tuple[int, int | None]:
        if self._numbers is None:
            text = self._source.encode()
            digest = hashlib.sha256(text).hexdigest()
            listener.source(f"{digest}.cpp", text)
            operator = listener.operator(f"cpp::{self.name}.s{digest[:8]}", self._parameters())
            fields = {"language": "cpp", "kernel": f"{digest}.cpp", "function": "kernel"}
            fields |= keep_fragment(listener, self._fragment)
            self._numbers = operator, listener.launch(fields)
        return self._numbers

    def _parameters(self) -> list[str]:
        match = SIGNATURE.search(self._source)
        return [part.split()[-1].lstrip("*&") for part in match.group(1).split(",")] if match else []


def _is_kernel(value: Any) -> bool:
    return hasattr(value, MARK) or (isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel")


def _source_in(module: ModuleType, name: str) -> str | None:
    """The source of the kernel that the generated `module` binds to `name`; None where its text does not tell."""
    binding = rf"^{name} = async_compile\.cpp_pybinding\(\[.*?\], r'''(.*?)'''\)"
    try:
        match = re.search(
            binding, Path(str(getattr(module, "__file__", None))).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    except OSError:
        return None
    return match.group(1) if match else None


def _human_name(name: str) -> str:
    """`cpp_fused_mul_silu_0` -> `mul_silu`."""
    match = re.fullmatch(r"cpp_(?:fused_*)?(\w+?)_*(?:_\d+)?", name)
    return match.group(1) if match else name

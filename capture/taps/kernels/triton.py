"""Triton: each launch of a kernel is a call, with its source, its grid and what it was compiled with.

`JITFunction.run` is seen as the grid is asked for: there Triton has bound every argument, defaults among them, and has
launched nothing yet. Warm-ups and the benchmarks of an autotuner are no calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kcap.capture.taps.external import Externals, contained
from kcap.capture.taps.kernels.launches import CompiledKernels, Kernel, Launches

ENGINE_OPTIONS = frozenset({"grid", "warmup", "stream", "debug", "instrumentation_mode", "num_warps", "num_stages"})


# Of what `_stored` returns as it is: it need not be asked.
PLAIN = frozenset({type(None), bool, int, float, torch.Tensor, torch.nn.Parameter})


class Triton(CompiledKernels):
    """Wraps the ways to launch a `@triton.jit` function, the interpreter's (TRITON_INTERPRET=1) among them."""

    name = "triton"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.launches = Launches(listener)
        self._seen = False

    def _hook_all(self) -> None:
        self._methods.when_imported("triton.runtime.jit", self._hook_run)
        for module, kind, method, around in (
            ("triton.runtime.interpreter", "InterpretedFunction", "run", self._interpret),
            ("triton.runtime.autotuner", "Autotuner", "_bench", self._ignored),
            ("triton.compiler.compiler", "CompiledKernel", "__getitem__", self._compiled),
        ):
            self._methods.when_imported(module, functools.partial(self._hook, kind=kind, method=method, around=around))

    def _health(self) -> tuple[str, str]:
        if not self._seen:
            return "absent", "Triton was not imported"
        return self.launches.health()

    @contained
    def _hook_run(self, module: ModuleType) -> None:
        self._methods.replace(module.JITFunction, "run", self._running)
        self._seen = True

    @contained
    def _hook(self, module: ModuleType, kind: str, method: str, around: Callable[..., Any]) -> None:
        self._methods.around(getattr(module, kind), method, around)
        self._seen = True

    # ---- around Triton's own ----

    def _listens(self, warmup: Any) -> bool:
        return not warmup and self.listener.listening

    def _running(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`JITFunction.run`, around `original`."""

        def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
            grid = kwargs.get("grid")
            if grid is None or not (self.on and self._listens(kwargs.get("warmup"))):
                return original(fn, *args, **kwargs)

            def seen(bound: dict[str, Any]) -> Any:
                size = grid(bound) if callable(grid) else grid
                self._launched(fn, bound, size, kwargs)
                return size

            compiled = original(fn, *args, **{**kwargs, "grid": seen})  # in `kwargs` it would hold itself, and them
            if getattr(fn, "_repr", None) is not None:
                self._named(fn, compiled)
            return compiled

        return run

    def _interpret(
        self, original: Callable[..., Any], fn: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any
    ) -> Any:
        """The interpreter runs a kernel by torch's own operators: they are its detail."""
        entered = self._listens(warmup) and self._interpreted(fn, args, kwargs, grid)
        try:
            return original(fn, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            if entered:
                self.listener.leave()

    def _compiled(self, original: Callable[..., Any], kernel: Any, grid: Any) -> Any:
        """`compiled[grid](*args)`: a launch that goes past `run`."""
        launch = original(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._listens(False):
                self._launched_compiled(kernel, args, grid)
            return launch(*args, **kwargs)

        return run

    # ---- what the tap makes of them ----

    @contained
    def _named(self, fn: Any, compiled: Any) -> None:
        """A function that names each of its kernels itself (`@triton.jit(repr=…)`)."""
        self.launches.compiled(fn, getattr(compiled, "name", None))

    @contained
    def _launched(self, fn: Any, bound: dict[str, Any], grid: Any, kwargs: dict[str, Any], enter: bool = False) -> bool:
        return self._tell(fn, bound, grid, kwargs.get("num_warps"), kwargs.get("num_stages"), kwargs, enter)

    def _tell(
        self,
        fn: Any,
        bound: dict[str, Any],
        grid: Any,
        warps: int | None,
        stages: int | None,
        keywords: dict[str, Any],
        enter: bool = False,
    ) -> bool:
        """`keywords`: what it is launched with by name, its options among them."""
        if 0 in grid:
            return False  # Triton launches nothing then
        kernel = self.launches.kernel(fn, lambda: _parameters(fn, bound))
        values, constexprs = kernel.values_in(bound)
        launch = self.launches.launch(kernel, grid, constexprs, warps, stages, _options(kernel, bound, keywords))
        if not PLAIN.issuperset(map(type, values)):
            values = list(map(_stored, values))
        return launch is not None and self.listener.launched(kernel.operator, launch, values, enter)

    @contained
    def _interpreted(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> bool:
        signature = inspect.signature(fn.fn)
        named = {name: value for name, value in kwargs.items() if name in signature.parameters}
        try:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            size = grid(bound.arguments) if callable(grid) else grid
        except Exception:
            return False  # the launch will raise it
        return bool(self._launched(fn, bound.arguments, size, kwargs, True))

    @contained
    def _launched_compiled(self, compiled: Any, args: tuple[Any, ...], grid: Any) -> None:
        fn = compiled.src.fn
        bound = dict(zip(fn.arg_names, args, strict=False))
        meta = compiled.metadata
        self._tell(fn, bound, grid, meta.num_warps, meta.num_stages, {})


def _options(kernel: Kernel, bound: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Those of a launch that are no arguments of the kernel."""
    names = kernel.options.get(key := tuple(keywords))
    if names is None:
        names = [name for name in keywords if name not in bound and name not in ENGINE_OPTIONS]
        kernel.options[key] = names
    return {name: keywords[name] for name in names}


def _stored(value: Any) -> Any:
    """The tensor in what `triton_kernels` wraps around one (its `Tensor`), of which Triton takes the address alone."""
    if hasattr(type(value), "storage"):  # torch's own has a method
        return value
    data = getattr(getattr(value, "storage", None), "data", None)
    return data if hasattr(data, "data_ptr") else value


def _parameters(fn: Any, bound: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names of a kernel's run-time parameters, and of its constexprs."""
    if hasattr(fn, "params"):
        fixed = {param.name for param in fn.params if param.is_constexpr}
    else:
        annotations = getattr(fn.fn, "__annotations__", {})
        fixed = {name for name, kind in annotations.items() if "constexpr" in str(kind)}
    return [name for name in bound if name not in fixed], [name for name in bound if name in fixed]

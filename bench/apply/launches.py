"""The seam of Triton's launches: a kernel is met where Triton or inductor launches it, by the id of its source.

For Triton a kernel is replaced as its grid is asked for: there every argument is bound and nothing is launched yet, and
a grid of no blocks launches nothing. Inductor's launchers are asked to run with all arguments; there the Solution runs
in their place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from kcap.bench.apply.seams import Replacements
from kcap.capture.hooks.identity import ByIdentity
from kcap.capture.hooks.imports import when_imported
from kcap.capture.hooks.patching import Methods
from kcap.capture.taps.kernels.inductor import given_names
from kcap.capture.taps.kernels.triton_source import Unreadable, read_source

NO_BLOCKS = (0, 0, 0)


class Launches:
    """Wraps the ways to launch a `@triton.jit` function, compiled or interpreted, and inductor's kernels."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._operators = frozenset(replacements.operators("launch"))
        self._methods = Methods()
        self._known = ByIdentity[str]()  # operators by function; "" for one that no plan replaces

    def install(self) -> None:
        """Wrap what is there, and the rest as it is imported; nothing where no launch is replaced."""
        if not self._operators:
            return
        for module, kind, around in (
            ("triton.runtime.jit", "JITFunction", self._run),
            ("triton.runtime.interpreter", "InterpretedFunction", self._interpret),
            ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", self._run_inductor),
        ):
            when_imported(module, functools.partial(self._hook, kind=kind, around=around))

    def uninstall(self) -> None:
        self._methods.undo()

    def _hook(self, module: ModuleType, kind: str, around: Callable[..., Any]) -> None:
        self._methods.around(getattr(module, kind), "run", around)

    def _operator(self, fn: Any) -> str | None:
        """The operator that launches of `fn` are recorded as, if the plan replaces any."""
        known = self._known.get(fn)
        if known is None:
            try:
                source = read_source(fn)
                name = f"triton::{source.name}.{source.id}"
            except Unreadable:
                name = ""
            known = self._known[fn] = name if name in self._operators else ""
        return known or None

    def _run(self, original: Callable[..., Any], fn: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        operator = None if warmup else self._operator(fn)
        if operator is None:
            return original(fn, *args, grid=grid, warmup=warmup, **kwargs)

        def launch() -> Any:
            return original(fn, *args, grid=grid, warmup=warmup, **kwargs)

        def asked(bound: Mapping[str, Any]) -> Any:
            return NO_BLOCKS if self._replaces(operator, bound, launch) else _size(grid, bound)

        return original(fn, *args, grid=asked, warmup=warmup, **kwargs)

    def _interpret(
        self, original: Callable[..., Any], fn: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any
    ) -> Any:
        def launch() -> Any:
            return original(fn, *args, grid=grid, warmup=warmup, **kwargs)

        operator = None if warmup else self._operator(fn)
        if operator is not None:
            signature = inspect.signature(fn.fn)
            named = {name: value for name, value in kwargs.items() if name in signature.parameters}
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            if self._replaces(operator, bound.arguments, launch):
                return None
        return launch()

    def _run_inductor(self, original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
        def launch() -> Any:
            return original(tuner, *args, **kwargs)

        interpreted = getattr(tuner, "triton_interpret", False)  # which launches as anybody's Triton
        operator = None if kwargs.get("benchmark_run") or interpreted else self._operator(tuner.fn)
        if operator is not None:
            named = dict(zip(given_names(tuner), args, strict=False))
            if self._replaces(operator, named, launch, constants=False):
                return None
        return launch()

    def _replaces(
        self, operator: str, bound: Mapping[str, Any], launch: Callable[[], Any], constants: bool = True
    ) -> bool:
        """Whether a Solution is in the place of this launch: it has run, or the engine's kernel has, by `launch`.
        `constants`: the constexprs must be as recorded, too; of inductor's kernels they say how it is computed, and not
        what."""
        one = self._replacements.find_named(operator, bound, bound if constants else None)
        if one is not None:
            self._replacements.run(*one, launch)
        return one is not None


def _size(grid: Any, bound: Mapping[str, Any]) -> Any:
    return grid(bound) if callable(grid) else grid

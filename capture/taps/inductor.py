"""Inductor: the launches of its Triton kernels.

Generated code calls `CachingAutotuner.run`; what that does to find the best configuration is no call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kcap.capture.imports import when_imported
from kcap.capture.taps.annotations import Annotations
from kcap.capture.taps.compiled import CompiledKernels
from kcap.capture.taps.external import MOST_LAUNCHES, Externals, contained
from kcap.capture.taps.fragments import bound_in, fragment_of
from kcap.capture.taps.launches import Kernel, Launches

NOTHING = -2  # in the place of a launch: a grid of no blocks, which launches nothing
Described = tuple[Kernel, int | None, list[int]]  # a kernel, its launch, and which of the arguments are its own


class Inductor(CompiledKernels):
    """Wraps the launcher of inductor's Triton kernels."""

    name = "inductor"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.launches = Launches(listener)
        self._hooked = False
        # By a launcher and the numbers among its arguments.
        self._grids: WeakKeyDictionary[Any, dict[tuple[int, ...], Described]] = WeakKeyDictionary()
        self._annotations = Annotations("torch._inductor.codegen.triton", "TritonScheduling")

    def _hook_all(self) -> None:
        when_imported("torch._inductor.runtime.triton_heuristics", self._hook)
        self._annotations.install()

    @contained
    def _hook(self, module: ModuleType) -> None:
        self._methods.around(module.CachingAutotuner, "run", self._run)
        self._hooked = True

    def uninstall(self) -> None:
        super().uninstall()
        self._annotations.uninstall()

    def _health(self) -> tuple[str, str]:
        if not self._hooked:
            return "absent", "inductor compiled nothing"
        status, detail = self.launches.health()
        return status, f"{detail}{self._annotations.trouble}"

    def _run(self, original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
        interpreted = getattr(tuner, "triton_interpret", False)  # which launches as anybody's Triton
        if kwargs.get("benchmark_run") or interpreted or not self.listener.listening:
            return original(tuner, *args, **kwargs)
        if len(tuner.launchers) == 1:
            self._launched(tuner, args)
            return original(tuner, *args, **kwargs)
        result = original(tuner, *args, **kwargs)  # which picks the configuration first
        self._launched(tuner, args)
        return result

    @contained
    def _launched(self, tuner: Any, args: tuple[Any, ...]) -> None:
        known = self._grids.setdefault(tuner, {})
        numbers = tuple(value for value in args if isinstance(value, int))
        if numbers not in known:
            if len(known) >= MOST_LAUNCHES:
                known.clear()
            known[numbers] = self._describe(tuner, args)
        elif known[numbers][1] is None:
            self.launches.lost += 1
        kernel, launch, own = known[numbers]
        if launch is not None and launch != NOTHING:
            self.listener.launched(kernel.operator, launch, [args[i] for i in own])

    def _describe(self, tuner: Any, args: tuple[Any, ...]) -> Described:
        names = _given(tuner)
        if len(names) != len(args):
            raise ValueError(f"{tuner.fn.__name__} takes {names}, and was given {len(args)} arguments")
        constants = _constants(tuner)
        absent = {name for name, value in constants.items() if value is None}
        extra = len(tuner.inductor_meta.get("extra_launcher_args", ()))
        own = [i for i, name in enumerate(names[: len(names) - extra]) if name not in absent]
        parameters = [names[i] for i in own]
        fixed = [name for name in tuner.fn.arg_names if name not in parameters]
        kernel = self.launches.kernel(tuner.fn, lambda: (parameters, fixed), lambda: _fragment(tuner))
        (launcher,) = tuner.launchers
        config = launcher.config
        constants |= config.kwargs
        grid = _grid(tuner, config, dict(zip(names, args, strict=True)))
        constexprs = {name: constants[name] for name in fixed if name in constants}
        if 0 in grid:
            return kernel, NOTHING, own
        return kernel, self.launches.launch(kernel, grid, constexprs, config.num_warps, config.num_stages, {}), own


def _fragment(tuner: Any) -> str | None:
    """What the generated code that runs `tuner` says of it."""
    place = bound_in(sys._getframe(1), tuner)
    return fragment_of(*place) if place else None


def _given(tuner: Any) -> list[str]:
    """The names of what generated code passes: every parameter but the constexprs, then what only the grid needs."""
    fixed = set(getattr(tuner.fn, "constexprs", ()))
    names = [name for index, name in enumerate(tuner.fn.arg_names) if index not in fixed]
    return [*names, *tuner.inductor_meta.get("extra_launcher_args", ())]


def _constants(tuner: Any) -> dict[str, Any]:
    """What the kernel was specialized on, by the names of its parameters."""
    names = tuner.fn.arg_names
    found = {}
    for key, value in tuner.triton_meta.get("constants", {}).items():
        index = key[0] if isinstance(key, tuple) else key
        found[names[index] if isinstance(index, int) else index] = value
    return found


def _grid(tuner: Any, config: Any, given: dict[str, Any]) -> tuple[int, ...]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    return tuple(GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(given))

"""What inductor compiled ahead of time, or with its C++ wrapper: code that launches kernels below every other tap.

A run of an AOTInductor package is one call, `aoti::run`, of the package's inputs; its kernels are its own. What runs
through the C++ wrapper (`torch._inductor.config.cpp_wrapper`) is handed over as bare pointers: it is counted as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kcap.capture.taps.external import Externals, contained
from kcap.capture.taps.kernels.launches import CompiledKernels

PACKAGES = "AOTIModelPackageLoader"
RUNNERS = "AOTIModelContainerRunner"  # followed by the device
RUN = ("run", "boxed_run")


class AheadOfTime(CompiledKernels):
    """Wraps what runs AOTInductor's packages, and what hands out the entries of graphs compiled with a C++ wrapper."""

    name = "aot_inductor"

    def __init__(self, listener: Externals) -> None:
        super().__init__(listener)
        self.runs = self.lost = 0
        self._packages: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def _hook_all(self) -> None:
        self._methods.when_imported("torch._C._aoti", self._hook_runners)
        self._methods.when_imported("torch._inductor.codecache", self._hook_wrapper)

    @contained
    def _hook_runners(self, module: ModuleType) -> None:
        for name, kind in vars(module).items():
            if name == PACKAGES or name.startswith(RUNNERS):
                self._methods.around(kind, "__init__", self._load)
                for method in RUN:
                    if hasattr(kind, method):
                        self._methods.around(kind, method, self._run)

    @contained
    def _hook_wrapper(self, module: ModuleType) -> None:
        if hasattr(module, "CppWrapperCodeCache"):
            self._methods.around(module.CppWrapperCodeCache, "load_pybinding", self._bind)

    def _health(self) -> tuple[str, str]:
        if self.lost:
            return "off", f"the kernels of {self.lost} runs of graphs with inductor's C++ wrapper are not recorded"
        return ("ok", f"{self.runs} runs of AOTInductor packages") if self.runs else ("absent", "no package ran")

    def _load(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
        original(runner, *args, **kwargs)
        self._loaded(runner, args[0] if args else next(iter(kwargs.values())))

    @contained
    def _loaded(self, runner: Any, path: Any) -> None:
        self._packages[runner] = Path(str(path)).stem

    def _run(self, original: Callable[..., Any], runner: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not self.listener.listening or not self._entered(runner, inputs):
            return original(runner, inputs, *args, **kwargs)
        try:
            return original(runner, inputs, *args, **kwargs)
        finally:
            self.listener.leave()

    @contained
    def _entered(self, runner: Any, inputs: Sequence[Any]) -> bool:
        package = self._packages.get(runner, "")  # which was loaded before this tap was there
        entered = self.listener.enter("aoti::run", (("package", "inputs"), (package, list(inputs))))
        self.runs += entered
        return entered

    def _bind(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = original(*args, **kwargs)

        def run(*handles: Any) -> Any:
            self.lost += self.on and self.listener.listening
            return bound(*handles)

        return run

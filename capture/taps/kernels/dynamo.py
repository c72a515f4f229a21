"""What Dynamo and inductor run to compile is no call of the program, and may be in a cache at the next start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kcap.capture.taps.external import contained
from kcap.capture.taps.kernels.fragments import keep_apart
from kcap.capture.taps.kernels.launches import CompiledKernels

RUNS = "CUDAGRAPH_RECORDING"  # runs the function for good as its graph is recorded
DIRECT = ("compile", "standalone_compile", "aot_compile", "aoti_compile_and_package")


class Dynamo(CompiledKernels):
    """Wraps what torch calls around each of its compilations (of a frame, or of a backward at its first use), and what
    compiles a graph that Dynamo did not trace. What they compile is cached apart."""

    name = "dynamo"

    def _hook_all(self) -> None:
        self._methods.when_imported("torch._dynamo.callback", self._hook)
        self._methods.when_imported("torch._inductor", self._hook_direct)
        keep_apart(self._methods)

    @contained
    def _hook(self, module: ModuleType) -> None:
        self._methods.around(module.CompilationCallbackHandler, "install_callbacks", self._compiles)

    @contained
    def _hook_direct(self, module: ModuleType) -> None:
        for name in DIRECT:
            if hasattr(module, name):
                self._methods.around(module, name, self._ignored)

    def _health(self) -> tuple[str, str]:
        return "ok", ""

    @contextlib.contextmanager
    def _compiles(self, original: Callable[..., Any], handler: Any, trigger: Any, compile_id: str) -> Iterator[None]:
        ignored = contextlib.nullcontext() if trigger.name == RUNS else self.listener.ignoring()
        with ignored, original(handler, trigger, compile_id):
            yield

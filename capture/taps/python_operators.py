"""Operators written in Python (`torch.library.custom_op`), which torch 2.14 and newer call past the dispatcher.

While the tap is installed they come through it, as in older releases; not even torch's profiler sees the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakSet

from kcap.capture.taps.external import contained
from kcap.capture.taps.kernels.launches import CompiledKernels

SWITCH, SWITCHED = "_enable_pyobj_dispatch", "_is_pyobj_dispatcher_enabled"
DEFINITIONS = "torch._library.custom_ops"


class PythonOperators(CompiledKernels):
    """Wraps the method by which torch takes an operator past its dispatcher."""

    name = "python_operators"

    def _hook_all(self) -> None:
        self._turned_off: WeakSet[Any] = WeakSet()
        self._methods.when_imported("torch._ops", self._hook)

    def uninstall(self) -> None:
        super().uninstall()
        for overload in self._turned_off:
            getattr(overload, SWITCH)(True)

    @contained
    def _hook(self, module: ModuleType) -> None:
        if not hasattr(module.OpOverload, SWITCH):
            return
        definitions = getattr(sys.modules.get(DEFINITIONS), "OPDEFS", {})
        for overload in [definition._opoverload for definition in list(definitions.values())]:
            if getattr(overload, SWITCHED)():
                self._switch(getattr(module.OpOverload, SWITCH), overload)
        self._methods.around(module.OpOverload, SWITCH, self._switch)

    def _switch(self, original: Callable[..., None], overload: Any, enabled: bool = True) -> None:
        if enabled:
            self._turned_off.add(overload)
        original(overload, False)

    def _health(self) -> tuple[str, str]:
        return ("ok", "") if hasattr(sys.modules["torch._ops"].OpOverload, SWITCH) else ("absent", "all are dispatched")

"""The TorchDispatchMode of the fallback recorder: what it sees, and how it comes to see what runs inside operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.capture.taps.arguments import operator_name

if TYPE_CHECKING:
    from kcap.capture.taps.dispatch_mode import DispatchModeRecorder

ATEN = ("aten", "prim", "prims")


class Mode(TorchDispatchMode):
    """The mode of one thread. `stack`: the operators under way there. `entered`: the places of those of them that were
    called from Python, and which are a library's."""

    def __init__(self, recorder: DispatchModeRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.on = False
        self.stack: list[str] = []
        self.entered: list[tuple[int, bool]] = []

    @property
    def parent(self) -> str | None:
        return self.stack[-1] if self.stack else None

    @property
    def in_library(self) -> bool:
        return any(library for _, library in self.entered)

    def enter(self) -> None:
        if not self.on:
            self.on = True
            self.__enter__()

    def leave(self) -> None:
        if self.on:
            self.on = False
            self.__exit__(None, None, None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = self._recorder.saw(self, func, args, kwargs)
        if at is None or func.namespace in ATEN:
            return func(*args, **kwargs)
        key = backend_key(func, args, kwargs)
        self.stack.append(operator_name(func._schema))
        try:
            if key is None:
                return func(*args, **kwargs)
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._recorder.left(self, at)


def backend_key(func: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key of a custom operator's own kernel, so that it can run with the mode on; None: run it plainly."""
    if torch.is_grad_enabled():
        return None
    devices = [arg.device.type for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    keys = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
    for name in devices[:1]:
        for key in (keys.get(name), torch._C.DispatchKey.CompositeExplicitAutograd):
            if key is not None and func.has_kernel_for_dispatch_key(key):
                return key
    return None

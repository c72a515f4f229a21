"""The TorchDispatchMode of the fallback recorder: what it sees, and how it comes to see what runs inside operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from kcap.capture.taps.dispatch_mode import DispatchModeRecorder

ATEN = ("aten", "prim", "prims")


class Mode(TorchDispatchMode):
    def __init__(self, recorder: DispatchModeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = self._recorder.saw(func, args, kwargs)
        if at is None or func.namespace in ATEN:
            return func(*args, **kwargs)
        key = backend_key(func, args, kwargs)
        self._recorder.enter(func)
        try:
            if key is None:
                return func(*args, **kwargs)
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._recorder.left(at)


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

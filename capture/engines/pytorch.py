"""Any PyTorch program: `kcap record -o DIR -- python my_inference.py`.

A step is a call of an outermost `torch.nn.Module`. Where that is a transformers model, its arguments tell the phase,
and inside `generate` a step goes on until the next begins, so that sampling is of the step before it. The window opens
at the first step: what the program calls outside steps from then on counts as phase `other`. `kcap.step()` marks steps
where there is no module. An engine of its own plugin that the program starts takes the process over.
"""

from __future__ import annotations

import atexit
import functools
import os
from threading import get_ident
from types import ModuleType
from typing import Any

from kcap.capture import marks
from kcap.capture.engines.engine import Framework, Start
from kcap.capture.engines.hooking import contained, wrap
from kcap.capture.engines.pytorch_steps import Steps, skip_frames
from kcap.capture.imports import when_imported
from kcap.capture.window import Window

FRAMEWORK = Framework("PyTorch", "torch", ("torch",), pip=("install torch",))
OFFLINE = None
GENERATE = "transformers.generation.utils"
DYNAMO = "torch._dynamo.eval_frame"


def arguments(start: Start) -> dict[str, Any]:
    """None of its own: a program starts itself."""
    return dict(start.given)


def hook(window: Window) -> None:
    """Hook every module's call, and transformers' `generate` when it is imported."""
    import torch

    steps = Steps(window)
    marks.steps = steps
    atexit.register(steps.say_if_none_ran)
    os.register_at_fork(after_in_child=steps.forget)
    call = _hook_modules(torch, steps)
    when_imported(GENERATE, contained(window, functools.partial(_hook_generate, steps=steps)))
    when_imported(DYNAMO, contained(window, lambda module: skip_frames(module, window, call)))


def _hook_modules(torch: Any, steps: Steps) -> Any:
    """Replace `Module.__call__`, which `steps.leave` undoes. Inside a step, it costs the try of a lock. While one
    thread generates, other threads' modules run in no step.

    Dynamo takes what it finds when it is imported, later, for PyTorch's own `__call__`, and traces past it.
    """
    kind = torch.nn.Module
    original, is_compiling = kind.__call__, torch.compiler.is_compiling

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            is_compiling()
            or ((generation := steps.generation) is not None and generation.thread != get_ident())
            or not (lock := steps.lock).acquire(False)
        ):
            return original(self, *args, **kwargs)
        began = None
        try:
            began = steps.begin(self, args, kwargs)
            output = original(self, *args, **kwargs)
        except BaseException:
            steps.discard(began)
            raise
        else:
            steps.end(began)
        finally:
            lock.release()
        return output

    def leave() -> None:
        if kind.__call__ is call:
            kind.__call__ = original

    steps.leave = leave
    kind.__call__ = call
    return call


def _hook_generate(module: ModuleType, steps: Steps) -> None:
    wrap(module.GenerationMixin, "generate", steps.generate)

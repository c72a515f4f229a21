"""SGLang's own operators: those that it calls past the dispatcher, and those that it fuses by name alone.

`register_custom_op` calls an operator's function directly, for plain tensors of a GPU, unless something watches: a
mode, or the profiler. While kcap listens, or a plan has a Solution in an operator's place, it is such a watcher, so
that every operator comes through the dispatcher, as `sglang::NAME`. What runs below (kernels of tvm-ffi modules,
FlashInfer, Triton) has taps of its own.

FlashInfer's `fast_decode_plan` is told from other plans by identity, also after kcap has given its functions back: what
SGLang keeps of it stays one object.

`BaseFusedOp` and the older `MultiPlatformOp` keep the method that they chose as `_forward_method`. Where they run
`forward_native`, which is PyTorch's operators, the call is a region: `sglang_op::RMSNorm`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from kcap.capture.taps.fused import Fused
from kcap.capture.window.window import Window

MODULE = "sglang.srt.utils.custom_op"
SHORTCUT, WATCHED = "_call_directly_in_eager", "_profiling"
FUSED = (("sglang.kernels.fused_op", "BaseFusedOp"), ("sglang.srt.layers.utils.multi_platform", "MultiPlatformOp"))
CHOSEN, NATIVE = "_forward_method", "forward_native"
TAP = "sglang_operators"
PLANNING, PLAN = "sglang.srt.layers.attention.flashinfer_backend", "fast_decode_plan"


def hook_operators(module: ModuleType, window: Window) -> None:
    """Have operators come through the dispatcher while the window watches; nothing where they always do."""
    shortcut = getattr(module, SHORTCUT, None)
    if shortcut is None:
        return
    watched = getattr(module, WATCHED, None)
    if watched is None or not _asks(shortcut.__code__, WATCHED):
        error = RuntimeError("operators that this SGLang calls past the dispatcher are not recorded")
        window.tap_failed(TAP, error)
        return
    setattr(module, WATCHED, lambda: watched() or window.watches_operators)


def hook_plan(module: Any) -> None:
    """Have SGLang keep a function of its own for FlashInfer's plan, which finds the recorded one while there is one."""
    plan = getattr(module, PLAN, None)
    if plan is None:
        return
    library = sys.modules[plan.__module__]

    def fast_decode_plan(*args: Any, **kwargs: Any) -> Any:
        return getattr(library, PLAN)(*args, **kwargs)

    setattr(module, PLAN, fast_decode_plan)


def _asks(code: CodeType, name: str) -> bool:
    """Whether `code`, or a function made in it, reads the global `name`."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_asks(constant, name) for constant in inner)


def name_fused(window: Window) -> None:
    """Of the model that has been loaded: before its graphs are captured."""
    try:
        window.taps.fused.record(fused_functions(), "this SGLang has none")
    except Exception as error:
        window.taps.fused.fail(error)


def fused_functions() -> Iterator[Fused]:
    """The operators that SGLang has made, where they run as PyTorch's: kernels, too, may fall back to that."""
    bases = tuple(getattr(sys.modules[module], name) for module, name in FUSED if module in sys.modules)
    for operator in gc.get_objects():
        if issubclass(type(operator), bases):
            for attribute in _attributes(operator):
                yield Fused(operator, attribute, f"sglang_op::{type(operator).__name__}", stateful=True)


def _attributes(operator: Any) -> tuple[str, ...]:
    """`forward_native`, and what an object that has chosen it keeps of it."""
    chosen = vars(operator).get(CHOSEN)
    return (NATIVE, CHOSEN) if getattr(chosen, "__name__", "") == NATIVE else (NATIVE,)

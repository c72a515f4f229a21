"""vLLM's own fused operators, where it runs them eagerly and as PyTorch's operators: those of its IR
(`vllm_ir::rms_norm`), and the objects of its CustomOp classes (`vllm_custom_op::silu_and_mul`).

vLLM chooses between that and a kernel: for an IR operator at each call, by its arguments; for a CustomOp when it is
made, by the platform (`_forward_method`), and some kernels' methods fall back to `forward_native`. A kernel is recorded
and known already, and a region around it would only cost time. So the region is around what the choice leads to, and a
kernel is called as it was: an IR operator's implementation `native`, and a CustomOp's `forward_native`. What does not
say which it is, is a region too: a `forward` of a class's own, a `_forward_method` that is none of vLLM's.

An IR operator's region has the name of the overload that changes no argument, for its native implementation changes
none. A CustomOp that is called as one of them does no more than call it, and has no region.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator
from types import MethodType
from typing import Any

from kcap.capture.taps.fused import Fused

IR = "vllm.ir.op"
CUSTOM_OPS = ("vllm.model_executor.custom_op", "vllm.model_executor.hw_agnostic.custom_op")
NATIVE, CHOSEN = "forward_native", "_forward_method"


def is_compiled(config: Any) -> bool:
    """Whether vLLM has torch compile the model, which then sees through these operators."""
    mode = config.compilation_config.mode
    return mode is not None and mode.name != "NONE"


def fused_functions() -> Iterator[Fused]:
    """Of the modules that vLLM has imported, and the objects that it has made."""
    ir = sys.modules.get(IR)
    of_ir: Any = ir.IrOp.registry if ir else {}
    for name, operator in of_ir.items():
        native = operator.impls["native"]
        if hasattr(native, "uuid"):
            native.uuid()  # keys vLLM's caches; made once, of the file that `impl_fn` is from
        yield Fused(native, "impl_fn", f"vllm_ir::{name}")
    for module in CUSTOM_OPS:
        if module in sys.modules:
            yield from _of_custom_ops(sys.modules[module].CustomOp, of_ir)


def _of_custom_ops(base: Any, of_ir: Container[str]) -> Iterator[Fused]:
    for operator in gc.get_objects():  # not all are modules of the model
        kind = type(operator)
        if issubclass(kind, base) and (name := _name(kind)) not in of_ir:
            for attribute in _attributes(operator, base):
                yield Fused(operator, attribute, f"vllm_custom_op::{name}", stateful=True)


def _name(kind: Any) -> str:
    """A class that is not registered goes by its Python name."""
    return str(getattr(kind, "name", kind.__name__))


def _attributes(operator: Any, base: Any) -> tuple[str, ...]:
    """What of a CustomOp may run as PyTorch's operators."""
    chosen = vars(operator).get(CHOSEN)
    if type(operator).forward is not base.forward or chosen is None:
        return ("forward",)
    return (NATIVE,) if _is_kernel(chosen) else (NATIVE, CHOSEN)


def _is_kernel(chosen: Any) -> bool:
    """A platform's method: `forward_cuda`."""
    name = getattr(chosen, "__name__", "")
    return isinstance(chosen, MethodType) and name.startswith("forward_") and name != NATIVE

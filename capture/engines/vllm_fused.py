"""vLLM's own fused operators: the operators of its IR (`vllm_ir::rms_norm`) and its CustomOp classes
(`vllm_custom_op::silu_and_mul`), where it runs them eagerly.

An IR operator is called without torch's dispatcher there; its region has the name, and the arguments, that the
dispatcher would give it. A CustomOp that is called as one of them does no more than call it, and has no region.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from typing import Any

from kcap.capture.taps.fused import Fused

IR = "vllm.ir.op"
CUSTOM_OPS = ("vllm.model_executor.custom_op", "vllm.model_executor.hw_agnostic.custom_op")


def is_compiled(config: Any) -> bool:
    """Whether vLLM has torch compile the model, which then sees through these classes."""
    mode = config.compilation_config.mode
    return mode is not None and mode.name != "NONE"


def classes() -> Iterator[Fused]:
    """Of the modules that vLLM has imported."""
    ir = sys.modules.get(IR)
    of_ir: Any = ir.IrOp.registry if ir else {}
    if ir:
        yield Fused(ir.IrOp, "_inner_call", _ir_name, lambda operator: operator.impls["native"].impl_fn)
        yield Fused(
            ir.IrOpInplaceOverload, "_inner_call", _ir_name, lambda overload: overload.op.impls["native"].impl_fn
        )
    for name in CUSTOM_OPS:
        if module := sys.modules.get(name):
            yield Fused(
                module.CustomOp,
                "forward",
                lambda operator: _custom_op_name(type(operator), of_ir),
                lambda operator: operator._forward_method,
                stateful=True,
            )


def _custom_op_name(kind: Any, of_ir: Container[str]) -> str | None:
    """A class that is not registered goes by its Python name."""
    name = getattr(kind, "name", kind.__name__)
    return None if name in of_ir else f"vllm_custom_op::{name}"


def _ir_name(operator: Any) -> str:
    return f"vllm_ir::{operator.name}"

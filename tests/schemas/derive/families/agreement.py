"""Whether a family's reference computes what an operator does, on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kcap.bench.check.checker import as_list, compare_outputs, compile_reference, copy_of
from kcap.schemas.derive.families import recognize
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.flashinfer.definition import Definition, from_bytes, to_bytes


def form(operator: str, **arguments: Any) -> KernelInstance:
    """The Form of a Call that its family takes."""
    found = recognize(Invocation(operator, arguments))
    assert found is not None, f"no family takes {operator}"
    return found


def declined(operator: str, **arguments: Any) -> bool:
    return recognize(Invocation(operator, arguments)) is None


def checked(made: KernelInstance) -> Definition:
    """Its Definition, through the format's own validators and back."""
    definition = made.definition()
    assert from_bytes(to_bytes(definition)) == definition
    return definition


def agrees(
    operator: str, run: Callable[..., Any], hidden: dict[str, torch.Tensor] | None = None, **arguments: Any
) -> KernelInstance:
    """The Form, once its reference gave what `run(**arguments)` gives: what it returns, or writes to its arguments."""
    invocation = Invocation(operator, arguments, hidden or {})
    made = recognize(invocation)
    assert made is not None, f"no family takes {operator}"
    definition = checked(made)
    inputs = [copy_of(slot.get()) for slot in made.inputs.values()]
    made.sizes(dict(zip(made.inputs, inputs, strict=True)))
    expected = as_list(compile_reference(definition.reference, definition.name)(*inputs))
    invocation.result = run(**arguments)
    actual = [slot.get() for slot in made.outputs.values()]
    result = compare_outputs(made, actual, expected)
    assert result["status"] == "agrees", result
    return made


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

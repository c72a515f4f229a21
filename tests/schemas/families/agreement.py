"""Whether a family's reference computes what an operator does, on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kcap.bench.check import compare, compiled, copied, listed
from kcap.schemas.definition import Definition, from_bytes, to_bytes
from kcap.schemas.families import form_of
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation


def form(operator: str, **arguments: Any) -> Form:
    """The Form of a Call that its family takes."""
    found = form_of(Invocation(operator, arguments))
    assert found is not None, f"no family takes {operator}"
    return found


def declined(operator: str, **arguments: Any) -> bool:
    return form_of(Invocation(operator, arguments)) is None


def checked(made: Form) -> Definition:
    """Its Definition, through the format's own validators and back."""
    definition = made.definition()
    assert from_bytes(to_bytes(definition)) == definition
    return definition


def agrees(
    operator: str, run: Callable[..., Any], hidden: dict[str, torch.Tensor] | None = None, **arguments: Any
) -> Form:
    """The Form, once its reference gave what `run(**arguments)` gives: what it returns, or writes to its arguments."""
    invocation = Invocation(operator, arguments, hidden or {})
    made = form_of(invocation)
    assert made is not None, f"no family takes {operator}"
    definition = checked(made)
    inputs = [copied(slot.get()) for slot in made.inputs.values()]
    made.sizes(dict(zip(made.inputs, inputs, strict=True)))
    expected = listed(compiled(definition.reference, definition.name)(*inputs))
    invocation.result = run(**arguments)
    actual = [slot.get() for slot in made.outputs.values()]
    result = compare(made, actual, expected)
    assert result["status"] == "agrees", result
    return made


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

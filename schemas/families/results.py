"""What an operator made, whichever way it gives it: an argument that it wrote, or what it returned."""

from __future__ import annotations

import torch

from kcap.schemas.families.invocation import Invocation

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OUTPUTS = ("out", "c", "C", "d", "output")


def result_dtype(call: Invocation, usual: torch.dtype) -> torch.dtype:
    """The dtype of what the operator writes or returns."""
    out, wanted = call.optional(*OUTPUTS), call["out_dtype"]
    if out is not None:
        return out.dtype
    return wanted if isinstance(wanted, torch.dtype) else usual


def written(call: Invocation, *names: str) -> torch.Tensor:
    """The argument of one of these names that the operator wrote, or else what it returned."""
    found = call.optional(*names)
    return call.result if found is None else found


def size(*tensors: torch.Tensor) -> int:
    """Bytes of all elements."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)


def distinct(indices: torch.Tensor) -> int:
    """How many rows `indices` name; where their values are not known, one."""
    return min(indices.numel(), 1) if indices.is_meta else len(indices.unique())

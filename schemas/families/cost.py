"""What one invocation of a kernel cannot do without: the bytes that it moves, and the FLOPs of its arithmetic.

Never too much: an input counts for what must be read of it, once, an output for what must be written, once. What is
not known counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.families.form import Form, Slot
from kcap.schemas.families.invocation import Unrecognized

NO_ARITHMETIC = ("int32", "int64", "bool")  # indices and masks


@dataclass(frozen=True)
class Cost:
    """`bytes`: read and written; `read`: those of them that certainly are of inputs.

    `flops`: a multiplication and an addition are two; 0 where nobody knows. `dtype`: of the operands, by torch's name.
    """

    bytes: int = 0
    read: int = 0
    flops: int = 0
    dtype: str = ""

    def within(self, inputs: int) -> Cost:
        """The same where the inputs are no more than so many bytes: two arguments may be one tensor."""
        unread = max(self.read - inputs, 0)
        return replace(self, bytes=self.bytes - unread, read=self.read - unread)


def of_form(form: Form) -> Cost:
    """What a family knows of its Call; no bytes or no FLOPs where values that decide them are not known."""
    written = sum(_written(slot, form) for slot in form.outputs.values())
    try:
        total = written + sum(_read(slot) for slot in form.inputs.values()) if form.touched is None else form.touched()
    except Unrecognized:
        total = 0
    return Cost(total, max(total - written, 0), _flops(form), arithmetic(form))


def _flops(form: Form) -> int:
    try:
        return form.flops() if callable(form.flops) else form.flops
    except Unrecognized:
        return 0


def arithmetic(form: Form) -> str:
    """The dtype of the first input that numbers are computed from; "" if there is none."""
    slots = [slot for slot in form.inputs.values() if slot.shape is not None]
    return next((slot.dtype for slot in slots if slot.dtype not in NO_ARITHMETIC), "")


def _read(slot: Slot) -> int:
    value = slot.get() if slot.shape is not None else None
    return reach(value) if isinstance(value, torch.Tensor) else 0


def _written(slot: Slot, form: Form) -> int:
    """Bytes of an output; of one whose size the inputs do not decide, none."""
    sizes, count = form.sizes(), 1
    for axis in slot.shape or ():
        count *= sizes.get(axis, 0)
    return count * BY_NAME[slot.dtype].bits // 8 if slot.dtype in BY_NAME else 0


def reach(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of `tensor`, at most: a broadcast dimension counts once."""
    if not tensor.numel():
        return 0
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(min(tensor.numel(), extent) * tensor.element_size())

"""ATen operators that read every element of their inputs and write every element of their outputs.

Those that torch tags pointwise, and the others that are named here. What looks something up, picks a part or may stop
early is none.
"""

from __future__ import annotations

from functools import cache

import torch

PICKS = frozenset({"where", "masked_fill", "masked_fill_"})  # pointwise, and yet not all is read
OTHERS = frozenset(
    "copy_ fill_ zero_ _to_copy to contiguous clone cat stack sum mean var std var_mean std_mean softmax _softmax"
    " log_softmax _log_softmax argmax argmin amax amin max min logsumexp cumsum cumprod sort topk layer_norm"
    " native_layer_norm group_norm native_group_norm bmm baddbmm mm addmm matmul linear norm linalg_vector_norm".split()
)
OVERWRITE = frozenset({"copy_", "fill_", "zero_"})  # what was in `self` is not read


def sweeps(operator: str) -> bool:
    """Whether the ATen operator (`aten::add.Tensor`) reads and writes all."""
    base, _, overload = operator.removeprefix("aten::").partition(".")
    return base not in PICKS and (base in OTHERS or _pointwise(base, overload or "default"))


def unread(operator: str) -> frozenset[str]:
    """The inputs that it only writes."""
    return frozenset({"self"}) if operator.removeprefix("aten::").split(".")[0] in OVERWRITE else frozenset()


@cache
def _pointwise(base: str, overload: str) -> bool:
    packet = getattr(torch.ops.aten, base, None)
    found = getattr(packet, overload, None)
    return found is not None and torch.Tag.pointwise in found.tags

"""Which ATen operators certainly read every element of their inputs and write every element of their outputs."""

from __future__ import annotations

from functools import cache

import torch

PARTIAL_READERS = frozenset({"where", "masked_fill", "masked_fill_"})  # pointwise, and yet not all is read
SWEEPING_OPERATORS = frozenset(
    "copy_ fill_ zero_ _to_copy to contiguous clone cat stack sum mean var std var_mean std_mean softmax _softmax"
    " log_softmax _log_softmax argmax argmin amax amin max min logsumexp cumsum cumprod sort topk layer_norm"
    " native_layer_norm group_norm native_group_norm bmm baddbmm mm addmm matmul linear norm linalg_vector_norm".split()
)


OVERWRITING_OPERATORS = frozenset({"copy_", "fill_", "zero_"})  # what was in `self` is not read


def sweeps_all(operator: str) -> bool:
    """Whether the ATen operator (`aten::add.Tensor`) reads all inputs and writes all outputs."""
    base, _, overload = operator.removeprefix("aten::").partition(".")
    return base not in PARTIAL_READERS and (base in SWEEPING_OPERATORS or _pointwise(base, overload or "default"))


def unread_inputs(operator: str) -> frozenset[str]:
    """The inputs that it only writes."""
    return (
        frozenset({"self"}) if operator.removeprefix("aten::").split(".")[0] in OVERWRITING_OPERATORS else frozenset()
    )


@cache
def _pointwise(base: str, overload: str) -> bool:
    packet = getattr(torch.ops.aten, base, None)
    operator = getattr(packet, overload, None)
    return operator is not None and torch.Tag.pointwise in operator.tags

"""Whether a Call does work: views and allocations are kernels of no work."""

from __future__ import annotations

from kcap.schemas.recording import Call
from kcap.schemas.values import TensorSpec, TorchConstant, contiguous_strides

# Operators that return their input where nothing needs changing, and copy otherwise.
MAY_COPY = frozenset(
    {"aten::contiguous", "aten::reshape", "aten::flatten", "aten::to", "aten::type_as", "aten::_to_copy"}
)
NO_WORK = frozenset({"aten::detach_", "aten::requires_grad_", "aten::resize_", "aten::set_"})


def does_work(call: Call) -> bool:
    """False for views and allocations, and for `contiguous`, `reshape` and `to` where they return their input.

    A `reshape` of strided memory is taken for a copy, though some of them are views.
    """
    base = call.operator.split(".")[0]
    if base in NO_WORK:
        return False
    if base not in MAY_COPY:
        return call.work
    source = next((arg.value for arg in call.args if isinstance(arg.value, TensorSpec)), None)
    if source is None:
        return call.work
    if base in ("aten::to", "aten::_to_copy", "aten::type_as"):
        return _converts(call, source)
    return source.effective_strides != contiguous_strides(source.shape)


def _converts(call: Call, source: TensorSpec) -> bool:
    if any(arg.name == "copy" and arg.value is True for arg in call.args) or call.operator.startswith("aten::_to_copy"):
        return True
    targets = [arg.value for arg in call.args[1:]]
    for target in targets:
        if isinstance(target, TensorSpec) and (target.dtype, target.device) != (source.dtype, source.device):
            return True
        if isinstance(target, TorchConstant) and target.kind == "dtype" and target.name != source.dtype:
            return True
        if isinstance(target, TorchConstant) and target.kind == "device" and target.name != source.device:
            return True
    return False

"""The family whose work a kernel does that no recognizer takes: by aten's operator, or by those that it was fused from.

It is known of kernels that get no Definition, too: where a fused kernel takes the sums that another one left, its
fragment does not say which of its nodes they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcap.errors import FormatError
from kcap.schemas.derive.fragment.binding import VIEWS
from kcap.schemas.derive.fragment.reference import MEAN, FragmentReference, reference_from
from kcap.schemas.derive.fragment.text import Operation, read_fragment
from kcap.schemas.derive.fragment.values import Ref
from kcap.schemas.derive.generic.pattern import registered_operator
from kcap.schemas.derive.invocation import MISREADING, Unrecognized
from kcap.schemas.recording.operators import SOURCES, base_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call

ACTIVATIONS = frozenset({"erf", "exp", "gelu", "relu", "sigmoid", "silu", "tanh"})
ATEN = {
    "copy": "cat clone constant_pad_nd contiguous copy_ repeat reshape stack to _to_copy type_as",
    "fill": "fill_ full full_like new_full new_ones new_zeros ones ones_like zero_ zeros zeros_like",
    "indexing": "gather index index_copy_ index_put_ index_select masked_select nonzero scatter scatter_ scatter_add_",
}
VIEW_BASES = {view.split(".")[1] for view in VIEWS}
FAMILY_BY_BASE = {base: family for family, bases in ATEN.items() for base in bases.split()}


def family_of_work(call: Call, recording: Recording | None) -> str:
    """Empty where that is not known."""
    return fused_family(call, recording) if call.namespace in SOURCES else aten_family(call.operator)


def aten_family(operator: str) -> str:
    """`copy`, `fill`, `indexing`, or what torch tags the operator as: `pointwise`, `reduction`."""
    namespace, _, base = base_of(operator).partition("::")
    if namespace != "aten":
        return ""
    if base in FAMILY_BY_BASE:
        return FAMILY_BY_BASE[base]
    try:
        tags = {str(tag).rpartition(".")[2] for tag in registered_operator(operator).tags}
    except Unrecognized:
        return ""
    return next((tag for tag in ("pointwise", "reduction") if tag in tags), "")


def fused_family(call: Call, recording: Recording | None) -> str:
    """`pointwise` where it is only arithmetic; empty where nothing says what the kernel stands for."""
    try:
        text = recording.fragment(call.launch) if recording is not None and call.launch is not None else None
        operators = _operators(call, text) if text is not None else set()
    except (FormatError, *MISREADING):
        return ""
    quantizes = any(spec.dtype.startswith("float8") for _, spec in call.tensors())
    return family_of_operators(operators, quantizes)


def _operators(call: Call, fragment: str) -> set[str]:
    """The base names of those in the kernel's reference or, where it has none, of all in its fragment."""
    reference, operations = reference_from(call, fragment), read_fragment(fragment).operations
    operators = {operation.target.split(".")[-2:][0] for operation in operations.values()}
    if isinstance(reference, FragmentReference):
        operators = set(re.findall(r"torch\.ops\.\w+\.(\w+)", reference.source)) - VIEW_BASES or {"copy_"}
    return operators | {"var"} if "sub" in operators and _subtracts_mean(operations) else operators


def _subtracts_mean(operations: Mapping[str, Operation]) -> bool:
    """As a variance does, also where it is written without aten's operator for it."""
    return any(
        isinstance(subtracted, Ref) and subtracted.name in operations and operations[subtracted.name].target == MEAN
        for operation in operations.values()
        if operation.target == "aten.sub.Tensor"
        for subtracted in operation.args[1:2]
    )


def family_of_operators(operators: set[str], quantizes: bool) -> str:
    """`operators`: base names (`mul`); `quantizes`: float8 is among what it reads and writes."""
    if not operators:
        return ""
    if len(operators) == 1 and operators & FAMILY_BY_BASE.keys():
        return FAMILY_BY_BASE[next(iter(operators))]
    if "rsqrt" in operators:
        if operators & {"var_mean", "var"}:
            return "layernorm"
        return "rmsnorm_quant" if quantizes else "rmsnorm"
    if {"exp", "amax"} <= operators:
        return "softmax"
    if operators & ACTIVATIONS:
        return "activation"
    if quantizes:
        return "quantize"
    if "embedding" in operators:
        return "embedding"
    return "rope" if "cat" in operators and operators & {"neg", "sub"} else "pointwise"

"""The family whose work a fused kernel of inductor does, by the ATen operators that it stands for.

It is known of kernels that get no Definition, too: where a kernel takes the sums that another one left, its fragment
does not say which of its nodes they are.
"""

from __future__ import annotations

from kcap.errors import FormatError
from kcap.schemas.derive.fragment.text import read_fragment
from kcap.schemas.derive.fragment.values import FragmentError
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call

ACTIVATIONS = frozenset({"erf", "exp", "gelu", "relu", "sigmoid", "silu", "tanh"})


def fused_family(call: Call, recording: Recording | None) -> str:
    """`pointwise` where it is only arithmetic; empty where nothing says what the kernel stands for."""
    try:
        text = recording.fragment(call.launch) if recording is not None and call.launch is not None else None
        operations = read_fragment(text).operations.values() if text is not None else ()
    except (FormatError, FragmentError):
        return ""
    quantizes = any(spec.dtype.startswith("float8") for _, spec in call.tensors())
    return family_of_operators({operation.target.split(".")[-2:][0] for operation in operations}, quantizes)


def family_of_operators(operators: set[str], quantizes: bool) -> str:
    """`operators`: base names (`mul`); `quantizes`: float8 is among what it reads and writes."""
    if not operators:
        return ""
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

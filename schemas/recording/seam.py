"""Seams: where a Call can be replaced in the engine that made it, below its compiler.

A registered operator can be overridden for a dispatch key, a Triton launch by its source's id, a library's Python
function where it is held. Nothing else can: a compiled C++ loop of inductor has no launcher in Python, a function
of a library of TVM's or tvm-ffi's is a symbol of it, and a collective's peers would have to change with it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from kcap.schemas.recording.operators import why_not_called
from kcap.schemas.recording.records import Call

Seam: TypeAlias = Literal["operator", "launch", "function"]

LIBRARIES = frozenset({"flashinfer", "deep_gemm"})  # whose functions are Python's
CLOSED = frozenset({"cpp", "tvm"})


def seam_of(call: Call) -> Seam | None:
    """The seam of a kernel; None where it has none."""
    if call.group is not None:
        return None
    if call.namespace == "triton":
        return "launch" if call.launch is not None and call.launch.kernel else None
    if call.namespace in LIBRARIES:
        return "function"
    if call.namespace in CLOSED or not call.namespace or why_not_called(call.operator):
        return None
    return "operator"

"""Find the callable behind an operator's name, through torch's table of registered operators and nothing else.

A name is looked up as a whole; it is never split and walked as attributes, so no other Python object can be reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kcap.replay import libraries
from kcap.replay.skip import Skip
from kcap.schemas.operators import DEFAULT, OperatorError, to_trace

# Operators that open files, load code, share memory by name or take addresses from their caller.
REFUSED = re.compile(
    r"(aten|debugprims|_C|_C_cuda_utils|_C_custom_ar|vllm)::"
    r"(from_file|save|load\w*|open_mem_handle|\w*shm_manager|init_cpu_memory_env|init_custom_ar|dispose|"
    r"\w*_ptrs?|swap_blocks\w*|release_dnnl_matmul_handler|create_onednn\w*|get_cuda_view_from_cpu_tensor|"
    r"weak_ref_tensor|_cudnn_init_dropout_state|set_data|record_stream)"
)
COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "_C_custom_ar"}
)
BUILT_IN = frozenset({"aten", "prims", "quantized", "_quantized", "onednn", "mkldnn", "sparse"})  # torch itself
NOT_KERNELS = frozenset({"prim", "profiler", "debugprims", "export", "debug_mode_ops", "rngprims", "static_runtime"})


@dataclass(frozen=True)
class Operator:
    """A registered operator: the callable below Python's wrappers, and its schema."""

    name: str
    call: Callable[..., Any]
    schema: Any


@cache
def resolve(name: str) -> Operator:
    """The operator called `name` (`aten::add.Tensor`, `_C::rms_norm`); Skip says why there is none."""
    try:
        namespace, base, overload = to_trace(name).split(".")
    except OperatorError as error:
        raise Skip(error.reason) from None
    refuse(name, namespace)
    base, overload = f"{namespace}::{base}", "" if overload == DEFAULT else overload
    if not registered(base, overload) and namespace not in BUILT_IN:
        libraries.load(namespace)
    if not registered(base, overload):
        raise Skip(f"torch {torch.__version__} and the libraries here have no operator {name}")
    call, *_ = torch._C._get_operation_overload(base, overload)
    return Operator(name, call, torch._C._get_schema(base, overload))


def refuse(name: str, namespace: str) -> None:
    """Skip if `name` must not or cannot be run from a file's word."""
    if REFUSED.match(name):
        raise Skip("refused: it opens files, loads code or takes raw addresses")
    if namespace in COLLECTIVES:
        raise Skip("a collective needs its process group")
    if namespace in NOT_KERNELS:
        raise Skip(f"operators of '{namespace}' are not kernels")


def registered(base: str, overload: str) -> bool:
    """Whether torch's dispatcher holds this very operator now (a library may add it when imported)."""
    return (f"{base}.{overload}" if overload else base) in torch._C._dispatch_get_all_op_names()

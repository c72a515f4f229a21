"""Find the callable behind an operator's name, through torch's table of registered operators and nothing else.

A name is looked up as a whole; it is never split and walked as attributes, so no other Python object can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kcap.replay import libraries
from kcap.replay.skip import Skip
from kcap.schemas.operators import DEFAULT, OperatorError, to_trace, why_not_called

BUILT_IN = frozenset({"aten", "prims", "quantized", "_quantized", "onednn", "mkldnn", "sparse"})  # torch itself


@dataclass(frozen=True)
class Operator:
    """A registered operator: the callable below Python's wrappers, and its schema; `notes` for its measurements.

    A kernel with a source of its own has its parameters in place of the schema.
    """

    name: str
    call: Callable[..., Any]
    schema: Any
    notes: Sequence[str] = ()


@cache
def resolve(name: str) -> Operator:
    """The operator called `name` (`aten::add.Tensor`, `_C::rms_norm`); Skip says why there is none."""
    try:
        namespace, base, overload = to_trace(name).split(".")
    except OperatorError as error:
        raise Skip(error.reason) from None
    if reason := why_not_called(name):
        raise Skip(reason)
    base, overload = f"{namespace}::{base}", "" if overload == DEFAULT else overload
    if not registered(base, overload) and namespace not in BUILT_IN:
        libraries.load(namespace)
    if not registered(base, overload):
        raise Skip(f"torch {torch.__version__} and the libraries here have no operator {name}")
    call, *_ = torch._C._get_operation_overload(base, overload)
    return Operator(name, call, torch._C._get_schema(base, overload))


def registered(base: str, overload: str) -> bool:
    """Whether torch's dispatcher holds this very operator now (a library may add it when imported)."""
    return (f"{base}.{overload}" if overload else base) in torch._C._dispatch_get_all_op_names()

"""Families: which Calls are one kernel, and what that kernel is. One file each; adding one is one new file.

A family is a function from an Invocation to a Form, registered under the operators that it knows:

>>> @family("rmsnorm", "_C::rms_norm")
... def rms_norm(call: Invocation) -> Form: ...

It raises Unrecognized for a Call that is not its own after all; the generic derivation then takes it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Invocation, Unrecognized, base_of

Recognize = Callable[[Invocation], Form]
# What arguments raise that the operator itself never takes: a number for a tensor, other ranks, a size of zero
NEVER_TAKEN = (Unrecognized, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
FAMILIES: dict[str, tuple[str, Recognize]] = {}


def family(name: str, *operators: str) -> Callable[[Recognize], Recognize]:
    """Register a function for these operators, named without overloads (`aten::mm`, `triton::fused_moe_kernel`)."""

    def register(recognize: Recognize) -> Recognize:
        FAMILIES.update(dict.fromkeys(operators, (name, recognize)))
        return recognize

    return register


def form_of(call: Invocation) -> Form | None:
    """`call` as a kernel of the family that knows its operator; None if there is none, or it declines."""
    name, recognize = find(call.operator)
    if recognize is None:
        return None
    try:
        form = recognize(call)
        form = form if form.family else replace(form, family=name)
        form.check()
    except NEVER_TAKEN:
        return None
    return form


def find(operator: str) -> tuple[str, Recognize | None]:
    """The family that knows `operator`, by name, and its function; ("", None) if there is none."""
    _import_all()
    return FAMILIES.get(base_of(operator), ("", None))


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

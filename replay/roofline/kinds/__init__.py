"""What kernels of an op_type must move and compute: one file each; adding one is one new file.

>>> @kind("gemm")
... def gemm(given: Given) -> Cost: ...

Datasets share op_types and the inputs' names (FlashInfer-Bench's), and no more than that: a function that does not find
its inputs raises LookupError, and the outputs alone count then.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from kcap.replay.roofline.given import Given
from kcap.schemas.families.cost import Cost

Count = Callable[[Given], Cost]
KINDS: dict[str, Count] = {}


def kind(*op_types: str) -> Callable[[Count], Count]:
    """Register a function for these op_types."""

    def register(count: Count) -> Count:
        KINDS.update(dict.fromkeys(op_types, count))
        return count

    return register


def find(op_type: str) -> Count | None:
    """The function that knows `op_type`; None if there is none."""
    _import_all()
    return KINDS.get(op_type)


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

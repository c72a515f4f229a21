"""The Cost of a Definition on a Workload's inputs, whatever dataset it is from: by op_type, where one is known.

What is not known of an op_type's inputs counts as not read; its outputs are written whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcap.replay.roofline import kinds, sweeps
from kcap.replay.roofline.given import Given
from kcap.schemas.definition import Definition
from kcap.schemas.families import NEVER_TAKEN
from kcap.schemas.families.cost import Cost

COPIES = frozenset("copy clone contiguous to to_copy fill zero".split())  # an input itself may be the answer


def cost_of(definition: Definition, inputs: Mapping[str, Any]) -> Cost | None:
    """What one invocation on `inputs` (by the Definition's names) must move and compute; None where nobody knows."""
    given = Given(definition, inputs)
    try:
        found = _cost(given)
    except NEVER_TAKEN:  # another dataset's inputs of the same names
        found = given.unread()
    return found if found and (found.bytes or found.flops) else None


def _cost(given: Given) -> Cost | None:
    op_type = given.definition.op_type
    if (known := kinds.find(op_type)) is not None:
        return known(given)
    if op_type in COPIES:
        return None
    return given.whole() if sweeps.sweeps(f"aten::{op_type}") else given.unread()

"""Which operators get no Definition, and why."""

from __future__ import annotations

import torch

from kcap.schemas.families.generic_operator import TORCH, Operator
from kcap.schemas.families.generic_outputs import Signature, named
from kcap.schemas.families.generic_pattern import Member
from kcap.schemas.work import MAY_COPY, does_work

VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift"})
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def why_no_kernel(signature: Signature, member: Member) -> str | None:
    """What it does instead: nothing, what no reference can repeat, or nothing that a Definition has."""
    own = signature.own
    names = [named(leaf.path) for _, leaf in signature.pattern.leaves()]
    names += [f"{named(leaf.path)}_out" for _, leaf in signature.written]
    if len(set(names)) < len(names):
        return "two of its arguments would have one name in a reference"
    if own.schema is None:
        return None if signature.written else "torch does not know this operator here: nothing tells what it returns"
    if own.namespace in TORCH and own.base in ALLOCATIONS:
        return "it allocates memory and computes nothing"
    if own.namespace in TORCH and _is_view(own, member):
        return "it is a view and computes nothing"
    if torch.Tag.nondeterministic_seeded in own.tags:
        return "it draws random numbers: no reference gives the same"
    if strange := own.strange():
        return f"it returns {strange}, not a tensor"
    if not signature.written and not own.fresh():
        return "it neither returns nor writes a tensor"
    return None


def _is_view(own: Operator, member: Member) -> bool:
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in own.schema.returns)
    return own.base in VIEWS or (aliases and f"aten::{own.base}" not in MAY_COPY) or not does_work(member.call)

"""A Definition for any Call that no family knows: its axes inferred over all Calls of the operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kcap.schemas.families.generic_form import Generic
from kcap.schemas.families.generic_group import Grouping
from kcap.schemas.families.generic_outputs import Signature, check_kernel
from kcap.schemas.families.generic_pattern import Member, Pattern, read
from kcap.schemas.families.invocation import Unrecognized
from kcap.schemas.operators import SOURCES
from kcap.schemas.records import Call

if TYPE_CHECKING:
    from kcap.schemas.families.derive import Kernel
    from kcap.schemas.recording import Recording

Refused = dict[int, str]


def derive(calls: list[Call], recording: Recording | None) -> tuple[list[Kernel], Refused]:
    """Kernels for `calls`, and why the others have none, by Call id."""
    refused: Refused = {}
    patterns: dict[Pattern, list[Member]] = defaultdict(list)
    for call in calls:
        try:
            pattern, member = _read(call)
        except Unrecognized as error:
            refused[call.id] = str(error)
        else:
            patterns[pattern].append(member)
    kernels = [kernel for pattern, members in patterns.items() for kernel in _kernels(pattern, members, refused)]
    return kernels, refused


def _read(call: Call) -> tuple[Pattern, Member]:
    if call.namespace in SOURCES:
        raise Unrecognized("its source says nothing of the ATen operators that it stands for")
    return read(call)


def _kernels(pattern: Pattern, members: list[Member], refused: Refused) -> Iterator[Kernel]:
    """The Kernels of one pattern's Calls."""
    from kcap.schemas.families.derive import Kernel, Use  # it imports this module

    grouping = Grouping(Signature(pattern), refused)
    try:
        check_kernel(grouping.signature, members[0])
    except Unrecognized as error:
        refused.update({member.call.id: str(error) for member in members})
        return
    for group in grouping.groups(members):
        generic = Generic(group)
        try:
            definition = generic.form.definition()
        except Unrecognized as error:
            refused.update({member.call.id: str(error) for member in group.members})
        else:
            yield Kernel(definition, "", tuple(Use(member.call, generic.bind) for member in group.members))

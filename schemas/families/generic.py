"""A Definition for any Call that no family knows: its axes inferred over all Calls of the operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kcap.schemas.families.generic_form import Generic
from kcap.schemas.families.generic_fused import signatures
from kcap.schemas.families.generic_group import Grouping
from kcap.schemas.families.generic_outputs import Signature
from kcap.schemas.families.generic_pattern import Member, Pattern, read
from kcap.schemas.families.generic_refused import why_no_kernel
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
    launched = [call for call in calls if call.namespace in SOURCES]
    found = [*_operators(calls, refused), *signatures(launched, recording, refused)]
    return [kernel for signature, members in found for kernel in _kernels(signature, members, refused)], refused


def _operators(calls: list[Call], refused: Refused) -> Iterator[tuple[Signature, list[Member]]]:
    """The patterns of the operators among `calls` with their Calls."""
    patterns: dict[Pattern, list[Member]] = defaultdict(list)
    for call in calls:
        if call.namespace not in SOURCES:
            try:
                pattern, member = read(call)
            except Unrecognized as error:
                refused[call.id] = str(error)
            else:
                patterns[pattern].append(member)
    for pattern, members in patterns.items():
        signature = Signature(pattern)
        if reason := why_no_kernel(signature, members[0]):
            refused.update({member.call.id: reason for member in members})
        else:
            yield signature, members


def _kernels(signature: Signature, members: list[Member], refused: Refused) -> Iterator[Kernel]:
    """The Kernels of one pattern's Calls."""
    from kcap.schemas.families.derive import Kernel, Use  # it imports this module

    for group in Grouping(signature, refused).groups(members):
        generic = Generic(group)
        try:
            definition = generic.form.definition()
        except Unrecognized as error:
            refused.update({member.call.id: str(error) for member in group.members})
        else:
            yield Kernel(definition, "", tuple(Use(member.call, generic.bind) for member in group.members))

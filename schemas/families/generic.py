"""A Definition for any Call that no family knows: its axes inferred over all Calls of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcap.schemas.records import Call

if TYPE_CHECKING:
    from kcap.schemas.families.derive import Kernel
    from kcap.schemas.recording import Recording


def derive(calls: list[Call], recording: Recording | None) -> tuple[list[Kernel], dict[int, str]]:
    """Kernels for `calls`, and why the others have none, by Call id."""
    return [], {call.id: "no family knows it" for call in calls}

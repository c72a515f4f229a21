"""Where references are checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckedOn:
    """The device to check on (None: as recorded), and whether a Recording from elsewhere may run its sources."""

    device: str | None = None
    trust: bool = False

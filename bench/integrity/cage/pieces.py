"""Which pieces of the confinement hold, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Pieces:
    """Kept while a cage is set up: every piece is tried, and one that this machine refuses is left out."""

    without: frozenset[str] = frozenset()
    held: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, step: Callable[[], object]) -> bool:
        """Whether `step` went well and `name` now holds; an OSError is its refusal, with the reason."""
        if name in self.without:
            self.refused[name] = "switched off"
            return False
        try:
            step()
        except OSError as error:
            self.refused[name] = error.strerror or str(error)
            return False
        self.held.append(name)
        return True

    def holds(self, *names: str) -> bool:
        """Whether any of `names` holds."""
        return any(name in self.held for name in names)

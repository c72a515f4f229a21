"""What generic rebuilding cannot know of an operator: one file per library, each Rule under its operator's name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from kcap.replay.bind import Bound
from kcap.replay.inputs import Inputs

RULES: dict[str, Rule] = {}


class Rule:
    """How to make valid arguments for one operator; each method's default leaves all to generic rebuilding."""

    remade: tuple[str, ...] = ()  # opaque arguments that `remake` makes; the recorded ones are dropped
    harmless: tuple[str, ...] = ()  # arguments that are written to with the same content each time

    def prepare(self, bound: Bound) -> None:
        """Before anything is allocated: decide integer values, shrink what is too large, or raise Skip."""

    def cut(self, bound: Bound) -> None:
        """Cut a table down to the rows that are read, so that copies of it fit into memory: for timing only."""

    def extra_bytes(self, bound: Bound) -> int:
        """Bytes that `remake` will allocate on the device."""
        return 0

    def touched(self, bound: Bound, total: int) -> int:
        """Of the `total` bytes of a set, those that one invocation can reach."""
        return total

    def remake(self, bound: Bound, inputs: Inputs) -> dict[str, Any]:
        """The arguments in `remade`, from the others (read with `argument`)."""
        return {}


def rule(*operators: str) -> Callable[[type[Rule]], type[Rule]]:
    """Register a Rule for these operators."""

    def register(kind: type[Rule]) -> type[Rule]:
        RULES.update({operator: kind() for operator in operators})
        return kind

    return register


def argument(bound: Bound, inputs: Inputs, name: str) -> Any:
    """The rebuilt argument called `name`; None if the Call has none of that name."""
    index = bound.index(name)
    if index is None:
        return None
    return inputs.kwargs[name] if bound.args[index].keyword else inputs.args[index]


def find(operator: str) -> Rule:
    """The Rule of `operator`, or the one that does nothing."""
    _import_all()
    return RULES.get(operator) or Rule()


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

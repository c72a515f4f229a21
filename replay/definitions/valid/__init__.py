"""Valid values for inputs that a Workload does not give: one file per kind of input, each rule under the input's name.

>>> @rule("*last_page_len")
... def last_page_len(draft: Draft, name: str) -> torch.Tensor: ...

A rule returns the whole input on the CPU (its dtype may differ from the Definition's) or None, where it is not its
own; it reads others with `draft[name]`, which makes them first. It stands here and not with the families of `schemas`,
since a Recording's values need no rule: only a Workload from elsewhere, or one whose blob is gone, does.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TypeAlias

import torch

from kcap.replay.definitions.draft import Draft

Make: TypeAlias = Callable[[Draft, str], "torch.Tensor | None"]


@dataclass(frozen=True)
class Rule:
    """`names`: patterns of input names; `op_types`: the kinds of Definition that it knows, none: all."""

    names: tuple[str, ...]
    op_types: tuple[str, ...]
    make: Make

    def knows(self, op_type: str, name: str) -> bool:
        kind = not self.op_types or op_type in self.op_types
        return kind and any(fnmatchcase(name, pattern) for pattern in self.names)


RULES: list[Rule] = []
CUTS: list[Callable[[Draft], None]] = []


def rule(*names: str, op_types: tuple[str, ...] = ()) -> Callable[[Make], Make]:
    """Register a rule for inputs with these names (`*` stands for anything)."""

    def register(make: Make) -> Make:
        RULES.append(Rule(names, op_types, make))
        return make

    return register


def cut(shrink: Callable[[Draft], None]) -> Callable[[Draft], None]:
    """Register what may make an input smaller without a reader noticing, once all integers are known."""
    CUTS.append(shrink)
    return shrink


def rules_for(op_type: str, name: str) -> Iterator[Rule]:
    """The rules for this input, those for its op_type before those for all."""
    _import_all()
    yield from sorted((r for r in RULES if r.knows(op_type, name)), key=lambda rule: not rule.op_types)


def shrink(draft: Draft) -> None:
    """Make inputs smaller where that changes nothing."""
    _import_all()
    for step in CUTS:
        step(draft)


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

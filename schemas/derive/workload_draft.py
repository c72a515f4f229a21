"""A Workload's inputs while they are made, and the rules for valid ones, which families register by `valid_input`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from kcap.schemas.derive.index_arguments import random_parts
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.recording.dtypes import BY_NAME, TORCH_NAMES
from kcap.schemas.results.measurement import MADE_UP
from kcap.system.registry import Registry, import_plugins


@dataclass
class WorkloadDraft:
    """The inputs so far. An index input is made first, and what it depends on before it.

    `axes`: the sizes of the variable axes; `given`: scalars, and tensors read from files; `missing`: files by input.

    `make` is called for an input that is neither given nor made, and returns None for one that may be random.
    `generator`, on the CPU, is for rules. `ruled`: inputs that rules made; `changes`: other notes on what differs.
    """

    definition: Definition
    axes: dict[str, int]
    given: dict[str, Any]
    generator: torch.Generator
    make: Callable[[WorkloadDraft, str], Any]
    missing: dict[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    ruled: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.definition.inputs

    def __getitem__(self, name: str) -> Any:
        """The input `name`, made if it is not there yet."""
        if name in self.given:
            return self.given[name]
        if name not in self.made:
            self.made[name] = self.make(self, name)
        return self.made[name]

    def axis_names(self, name: str) -> Sequence[str]:
        """The axes of the input `name`; none for a scalar."""
        return self.definition.inputs[name].shape or ()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the input `name`, in elements; ValueError names an axis that has no size."""
        return self.definition.sizes(self.axis_names(name), self.axes)

    def size(self, *names: str) -> int | None:
        """The size of the first of these axes that the Definition has; None if it has none of them."""
        sizes = {**self.axes, **self.definition.const_axes}
        return next((sizes[name] for name in names if name in sizes), None)

    def first(self, *names: str) -> str | None:
        """The first of these names that is an input; None if none is."""
        return next((name for name in names if name in self), None)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        """int64 numbers of [low, high)."""
        return torch.randint(low, max(high, low + 1), tuple(shape), generator=self.generator)

    def reals(self, low: float, high: float, shape: Sequence[int]) -> torch.Tensor:
        """float32 numbers of [low, high)."""
        return torch.rand(tuple(shape), generator=self.generator) * (high - low) + low

    def distinct(self, count: int, limit: int) -> torch.Tensor:
        """`count` numbers below `limit` in random order, no two the same where there are as many."""
        order = torch.randperm(max(limit, 1), generator=self.generator)
        return order.repeat(-(-count // max(len(order), 1)))[:count]

    def parts(self, total: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """As `random_parts`."""
        return random_parts(total, low, high, self.generator)

    def notes(self) -> list[str]:
        """How the inputs differ from the Workload: files that are missing, inputs that rules made, other changes."""
        ruled = [name for name in self.definition.inputs if name in self.ruled and name not in self.missing]
        files = dict.fromkeys(self.missing.values())
        absent = [(file, [name for name, path in self.missing.items() if path == file]) for file in files]
        return [
            *(f"{MADE_UP} {file}: {', '.join(names)}" for file, names in absent),
            *([f"made up within what is valid: {', '.join(ruled)}"] if ruled else []),
            *self.changes,
        ]

    def nbytes(self) -> int:
        """The bytes of all inputs and outputs, made or not."""
        tensors = (*self.definition.inputs.values(), *self.definition.outputs.values())
        return sum(
            math.prod(self.definition.sizes(t.shape, self.axes)) * element_bits(t.dtype) // 8
            for t in tensors
            if t.shape
        )


def element_bits(name: str) -> int:
    """The bits of one element of a Definition's dtype, as torch counts elements."""
    return BY_NAME[TORCH_NAMES.get(name, name)].bits


MakeInput: TypeAlias = Callable[[WorkloadDraft, str], "torch.Tensor | None"]

# By op_type ("": any) and pattern of the input's name. Patterns may overlap: where a rule returns None, the next one
# that matches is asked.
INPUT_RULES: Registry[tuple[str, str], MakeInput] = Registry("rule for inputs of op_type and name")
INPUT_TRIMS: list[Callable[[WorkloadDraft], None]] = []  # all of them run


def valid_input(*names: str, op_types: tuple[str, ...] = ("",)) -> Callable[[MakeInput], MakeInput]:
    """Register a rule for inputs with these names (`*` stands for anything), of these op_types or of all.

    It returns a whole tensor on the CPU, whose dtype may differ from the Definition's, or None where the input is not
    its own. It reads other inputs with `draft[name]`, which makes them first.
    """

    def register(make: MakeInput) -> MakeInput:
        for op_type in op_types:
            for name in names:
                INPUT_RULES.add((op_type, name), make)
        return make

    return register


def trims_inputs(trim: Callable[[WorkloadDraft], None]) -> Callable[[WorkloadDraft], None]:
    """Register a function that makes inputs smaller without changing the result, once all integers are known."""
    INPUT_TRIMS.append(trim)
    return trim


def input_rules_for(op_type: str, name: str) -> Iterator[MakeInput]:
    """The rules for this input, those for its op_type before those for any."""
    import_plugins("kcap.schemas.derive.families")
    matching = [key for key in INPUT_RULES if key[0] in (op_type, "") and fnmatchcase(name, key[1])]
    yield from dict.fromkeys(INPUT_RULES[key] for key in sorted(matching, key=lambda key: not key[0]))


def trim_inputs(draft: WorkloadDraft) -> None:
    """Make inputs smaller where that does not change the result."""
    import_plugins("kcap.schemas.derive.families")
    for trim in INPUT_TRIMS:
        trim(draft)

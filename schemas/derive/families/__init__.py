"""What is known of each kernel family: one folder or file a family; adding a family is adding one file.

Four things are registered here, each by a decorator:

>>> @family("rmsnorm", "_C::rms_norm")  # recognizes a Call's invocation as a kernel
... def rms_norm(call: Invocation) -> KernelInstance: ...
>>> @cost_function("gemm")  # bytes and FLOPs of a Definition's op_type on a Workload's inputs
... def gemm(inputs: CostInputs) -> Cost: ...
>>> @valid_input("*last_page_len")  # values for an input that a Workload does not give
... def last_page_len(draft: WorkloadDraft, name: str) -> torch.Tensor: ...
>>> @replay_rule("aten::embedding")  # what generic rebuilding cannot know of an operator's arguments
... class Embedding(ReplayRule): ...

A recognizer raises Unrecognized for a Call that is not its own after all; the generic derivation then takes it. A cost
function that does not find its inputs raises LookupError, and the outputs alone count. A valid input is a whole tensor
on the CPU (its dtype may differ from the Definition's) or None, where it is not the rule's own; it reads others with
`draft[name]`, which makes them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs
from kcap.schemas.derive.cost import Cost, CostInputs
from kcap.schemas.derive.invocation import Invocation, Unrecognized, base_of
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.system.registry import Registry, import_plugins

Recognizer = Callable[[Invocation], KernelInstance]


# What arguments raise that the operator itself never takes: a number for a tensor, other ranks, a size of zero
NEVER_TAKEN = (Unrecognized, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


FAMILIES: Registry[str, tuple[str, Recognizer]] = Registry("operator of a family")


def family(name: str, *operators: str) -> Callable[[Recognizer], Recognizer]:
    """Register a function for these operators, named without overloads (`aten::mm`, `triton::fused_moe_kernel`)."""

    def register(recognize: Recognizer) -> Recognizer:
        for operator in operators:
            FAMILIES.add(operator, (name, recognize))
        return recognize

    return register


def recognize(call: Invocation) -> KernelInstance | None:
    """`call` as a kernel of the family that knows its operator; None if there is none, or it declines."""
    name, recognize = family_of(call.operator)
    if recognize is None:
        return None
    try:
        form = recognize(call)
        form = form if form.family else replace(form, family=name)
        form.check()
    except NEVER_TAKEN:
        return None
    return form


def family_of(operator: str) -> tuple[str, Recognizer | None]:
    """The family that knows `operator`, by name, and its function; ("", None) if there is none."""
    import_plugins(__name__)
    return FAMILIES.get(base_of(operator)) or ("", None)


REPLAY_RULES: Registry[str, ReplayRule] = Registry("operator with a replay rule")


class ReplayRule:
    """How to make valid arguments for one operator; each method's default leaves all to generic rebuilding."""

    remade: tuple[str, ...] = ()  # opaque arguments that `remake` makes; the recorded ones are dropped
    harmless: tuple[str, ...] = ()  # arguments that are written to with the same content each time

    def prepare(self, bound: BoundCall) -> None:
        """Before anything is allocated: decide integer values, shrink what is too large, or raise Skip."""

    def cut(self, bound: BoundCall) -> None:
        """Cut a table down to the rows that are read, so that copies of it fit into memory: for timing only."""

    def extra_bytes(self, bound: BoundCall) -> int:
        """Bytes that `remake` will allocate on the device."""
        return 0

    def touched(self, bound: BoundCall, total: int) -> int:
        """Of the `total` bytes of a set, those that one invocation can reach."""
        return total

    def remake(self, bound: BoundCall, inputs: Inputs) -> dict[str, Any]:
        """The arguments in `remade`, from the others (read with `argument`)."""
        return {}


def replay_rule(*operators: str) -> Callable[[type[ReplayRule]], type[ReplayRule]]:
    """Register a Rule for these operators."""

    def register(kind: type[ReplayRule]) -> type[ReplayRule]:
        for operator in operators:
            REPLAY_RULES.add(operator, kind())
        return kind

    return register


def rebuilt_argument(bound: BoundCall, inputs: Inputs, name: str) -> Any:
    """The rebuilt argument called `name`; None if the Call has none of that name."""
    index = bound.index(name)
    if index is None:
        return None
    return inputs.kwargs[name] if bound.args[index].keyword else inputs.args[index]


def replay_rule_for(operator: str) -> ReplayRule:
    """The Rule of `operator`, or the one that does nothing."""
    import_plugins(__name__)
    return REPLAY_RULES.get(operator) or ReplayRule()


CostFunction = Callable[[CostInputs], Cost]


COST_FUNCTIONS: Registry[str, CostFunction] = Registry("op_type with a cost function")


def cost_function(*op_types: str) -> Callable[[CostFunction], CostFunction]:
    """Register a function for these op_types."""

    def register(count: CostFunction) -> CostFunction:
        for op_type in op_types:
            COST_FUNCTIONS.add(op_type, count)
        return count

    return register


def cost_function_for(op_type: str) -> CostFunction | None:
    """The function that knows `op_type`; None if there is none."""
    import_plugins(__name__)
    return COST_FUNCTIONS.get(op_type)


MakeInput: TypeAlias = Callable[[WorkloadDraft, str], "torch.Tensor | None"]


@dataclass(frozen=True)
class InputRule:
    """`names`: patterns of input names; `op_types`: the kinds of Definition that it knows, none: all."""

    names: tuple[str, ...]
    op_types: tuple[str, ...]
    make: MakeInput

    def knows(self, op_type: str, name: str) -> bool:
        kind = not self.op_types or op_type in self.op_types
        return kind and any(fnmatchcase(name, pattern) for pattern in self.names)


INPUT_RULES: list[InputRule] = []


INPUT_TRIMS: list[Callable[[WorkloadDraft], None]] = []


def valid_input(*names: str, op_types: tuple[str, ...] = ()) -> Callable[[MakeInput], MakeInput]:
    """Register a rule for inputs with these names (`*` stands for anything)."""

    def register(make: MakeInput) -> MakeInput:
        INPUT_RULES.append(InputRule(names, op_types, make))
        return make

    return register


def trims_inputs(shrink: Callable[[WorkloadDraft], None]) -> Callable[[WorkloadDraft], None]:
    """Register what may make an input smaller without a reader noticing, once all integers are known."""
    INPUT_TRIMS.append(shrink)
    return shrink


def input_rules_for(op_type: str, name: str) -> Iterator[InputRule]:
    """The rules for this input, those for its op_type before those for all."""
    import_plugins(__name__)
    yield from sorted((r for r in INPUT_RULES if r.knows(op_type, name)), key=lambda rule: not rule.op_types)


def trim_inputs(draft: WorkloadDraft) -> None:
    """Make inputs smaller where that changes nothing."""
    import_plugins(__name__)
    for step in INPUT_TRIMS:
        step(draft)

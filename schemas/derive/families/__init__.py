"""What is known of each kernel family: one folder or file a family; adding a family is adding one file.

A family registers what it knows, each by a decorator:

>>> @family("rmsnorm", "_C::rms_norm")  # recognizes an invocation of the operator as a kernel
... def rms_norm(call: Invocation) -> KernelInstance: ...
>>> @cost_function("gemm")  # bytes and FLOPs of a Definition's op_type on a Workload's inputs
... def gemm_cost(inputs: CostInputs) -> Cost: ...
>>> @valid_input("*last_page_len")  # values for an input that a Workload leaves out
... def last_page_len(draft: WorkloadDraft, name: str) -> torch.Tensor: ...
>>> @replay_rule("aten::embedding")  # what generic rebuilding cannot know of an operator's arguments
... class Embedding(ReplayRule): ...

`family` is defined here, the others beside the types that they take: `cost`, `workload_draft` and `bound_call`.
schemas/README.md has a whole family to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kcap.errors import FormatError, kind_and_line
from kcap.schemas.derive.bound_call import ReplayRule, Skip, rebuilt_argument, replay_rule, replay_rule_for
from kcap.schemas.derive.cost import cost_function, cost_function_for
from kcap.schemas.derive.invocation import MISREADING, Invocation, Unrecognized
from kcap.schemas.derive.kernel import KernelInstance
from kcap.schemas.derive.workload_draft import input_rules_for, trim_inputs, trims_inputs, valid_input
from kcap.schemas.recording.operators import base_of
from kcap.system.registry import Registry, import_plugins

__all__ = [
    "FAMILIES",
    "REFUSALS",
    "ReplayRule",
    "cost_function",
    "cost_function_for",
    "family",
    "family_of",
    "input_rules_for",
    "rebuilt_argument",
    "recognize",
    "replay_rule",
    "replay_rule_for",
    "trim_inputs",
    "trims_inputs",
    "valid_input",
    "why_not_taken",
]

Recognizer = Callable[[Invocation], KernelInstance]

# What a family and its ReplayRule raise on arguments that they do not know, or that the operator never takes;
# FormatError: on a file that a Sample or a Launch names, and that is damaged
REFUSALS = (Unrecognized, Skip, FormatError, MemoryError, *MISREADING)
FAMILIES: Registry[str, tuple[str, Recognizer]] = Registry("operator of a family")


def family(name: str, *operators: str) -> Callable[[Recognizer], Recognizer]:
    """Register a recognizer for these operators, named without overloads (`aten::mm`, `triton::fused_moe_kernel`).

    It raises Unrecognized for an invocation that the family does not model; the generic derivation takes that.
    """

    def register(recognizer: Recognizer) -> Recognizer:
        for operator in operators:
            FAMILIES.add(operator, (name, recognizer))
        return recognizer

    return register


def recognize(call: Invocation) -> KernelInstance | None:
    """`call` as a kernel of the family that knows its operator; None if there is none, or it declines."""
    name, recognizer = family_of(call.operator)
    if recognizer is None:
        return None
    try:
        kernel = recognizer(call)
        kernel = kernel if kernel.family else replace(kernel, family=name)
        kernel.check()
    except REFUSALS:
        return None
    return kernel


def why_not_taken(error: Exception) -> str:
    """The reason that one of REFUSALS gives; where it is Python's or torch's own, its kind, too."""
    if isinstance(error, Unrecognized | Skip | FormatError):
        return str(error)
    return f"kcap cannot read it: {kind_and_line(error, 160)}"


def family_of(operator: str) -> tuple[str, Recognizer | None]:
    """The name and recognizer of the family that knows `operator`; ("", None) if there is none."""
    import_plugins(__name__)
    return FAMILIES.get(base_of(operator)) or ("", None)

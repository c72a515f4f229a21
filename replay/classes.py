"""An engine's own operator classes, run alone: a new object of the class gets what the recorded one held.

`sglang_op::RMSNorm` is a region, never replayed for its time; the reference of its Definition is held against it. A
name is looked up among the classes that derive from the engine's base of operators, and nowhere else. What an object
holds under a private name is in no Recording: PRIVATE has what the classes cannot do without.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kcap.replay import libraries
from kcap.replay.launch_values import Parameters
from kcap.replay.operators import Operator
from kcap.replay.skip import Skip
from kcap.schemas.recording import Call

BASES = {
    "sglang_op": (
        ("sglang.kernels.fused_op", "BaseFusedOp"),
        ("sglang.srt.layers.utils.multi_platform", "MultiPlatformOp"),
    ),
    "vllm_custom_op": (("vllm.model_executor.custom_op", "CustomOp"),),
}
PRIVATE = {
    "sglang_op": {"_apply_rotary_emb_wrapped": ("sglang.srt.layers.rotary_embedding.utils", "apply_rotary_emb")},
}
FORWARD = "forward_native"  # as PyTorch's operators: what was recorded


def is_class(call: Call) -> bool:
    """Whether `call` is of one of an engine's classes."""
    return call.namespace in BASES


def resolve(call: Call) -> Operator:
    """What runs `call`; Skip says why nothing does."""
    libraries.load(call.namespace)
    kind = _find(call)
    given = _parameters(kind)
    names = [argument.name or "" for argument in call.args]
    held = {name: found for name, place in PRIVATE.get(call.namespace, {}).items() if (found := _attribute(*place))}

    def run(*values: Any) -> Any:
        arguments = dict(zip(names, values, strict=True))
        state = {name: value for name, value in arguments.items() if name not in given}
        forward = getattr(_made(kind, {**held, **state}), FORWARD)
        return forward(**{name: value for name, value in arguments.items() if name in given})

    return Operator(call.operator, run, Parameters.of(names, ()))


def _find(call: Call) -> type[torch.nn.Module]:
    wanted = call.operator.split("::")[-1]
    for place in BASES[call.namespace]:
        for kind in _derived(_attribute(*place)):
            if getattr(kind, "name", kind.__name__) == wanted or kind.__name__ == wanted:
                return kind
    raise Skip(f"the library here has no operator class {wanted}")


def _attribute(module: str, name: str) -> Any:
    """None where the library has no such module, or it was not imported."""
    return getattr(sys.modules.get(module), name, None)


def _derived(base: Any) -> Iterator[type[torch.nn.Module]]:
    for kind in base.__subclasses__() if base else ():
        yield kind
        yield from _derived(kind)


def _parameters(kind: type[torch.nn.Module]) -> list[str]:
    """The names of what its forward takes; Skip where it names none."""
    known = inspect.signature(getattr(object.__new__(kind), FORWARD)).parameters
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in known.values()):
        raise Skip(f"{kind.__name__} does not say what it takes")
    return list(known)


def _made(kind: type[torch.nn.Module], state: Mapping[str, Any]) -> torch.nn.Module:
    """An object that was never initialized: its class may ask for an engine that runs."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in state.items():
        setattr(made, name, value)
    return made

"""A Definition's Workload ready to run: its inputs, and its reference, whose code runs when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kcap.replay.definitions.inputs import Made, make_inputs
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.python_source import function, parameters
from kcap.schemas.workload import Workload


@dataclass(frozen=True)
class Prepared:
    """`made.inputs` are in the Definition's order, as a Solution takes them; `arguments` as the reference does."""

    definition: Definition
    made: Made

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The reference's `run`. Its source is code from elsewhere: ask in a process that is there for it alone."""
        return compiled(self.definition.reference, self.definition.name)

    @property
    def arguments(self) -> list[Any]:
        given = dict(zip(self.definition.inputs, self.made.inputs, strict=True))
        return [given[name] for name in order(self.definition)]

    @property
    def notes(self) -> list[str]:
        """What is not as the Workload or the Definition has it."""
        return self.made.notes + note_on_order(self.definition)


def prepare(
    definition: Definition,
    workload: Workload,
    dataset: Dataset | None,
    device: str = "cpu",
    seed: int = 0,
    limit: int | None = None,
) -> Prepared:
    """`workload` on `device`, the same for the same `seed`; raises what `make_inputs` does, and runs nothing."""
    return Prepared(definition, make_inputs(definition, workload, dataset, device, seed, limit))


def compiled(text: str, name: str) -> Callable[..., Any]:
    """The `run` of a reference; this process is there for it."""
    scope: dict[str, Any] = {"__name__": f"reference_{name}"}
    exec(compile(text, source_name(name), "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def source_name(name: str) -> str:
    """What tracebacks call the file of the reference of the Definition `name`."""
    return f"<reference of {name}>"


def order(definition: Definition) -> list[str]:
    """The inputs as `run` takes them: in the Definition's order, unless its parameters name them all in another."""
    names = parameters(function(definition.reference, "run"))
    return names if sorted(names) == sorted(definition.inputs) else list(definition.inputs)


def note_on_order(definition: Definition) -> list[str]:
    taken = order(definition)
    if taken == list(definition.inputs):
        return []
    return [f"called by name, by position it would fail: its reference takes {', '.join(taken)}"]

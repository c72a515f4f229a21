"""The inputs of a Workload: scalars as they are, tensors from the dataset's blobs, the rest drawn or made by rules.

What a random number cannot be (an offset, a page, an expert, a probability) is made by a rule of
`replay/definitions/valid`, and so is what the Workload names a file for that is not there; both are said in the notes.
The Definition's constraints hold of what is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kcap.errors import KcapError
from kcap.replay import memory
from kcap.replay.definitions import constraints, given, valid
from kcap.replay.definitions.draft import Draft
from kcap.replay.definitions.draw import draw, torch_dtype
from kcap.replay.indices import DATA_ONLY, SMALL
from kcap.replay.skip import Skip
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition, DefinitionTensor
from kcap.schemas.workload import Workload, check_workload

SHARE = 0.5  # of the free memory, which the kernel needs too


@dataclass(frozen=True)
class Made:
    """`inputs` in the Definition's order, None where the Workload leaves an optional one out.

    `axes`: the sizes of the variable axes, a cache's cut to the pages in use. `notes`: what is not as the Workload has
    it. `origins`: of each input, whether the Workload gives it, a rule made it, or nothing is known of it.
    """

    inputs: list[Any]
    notes: list[str]
    axes: dict[str, int]
    origins: dict[str, Literal["given", "ruled", "drawn"]] = field(default_factory=dict)


def make_inputs(
    definition: Definition,
    workload: Workload,
    dataset: Dataset | None,
    device: str = "cpu",
    seed: int = 0,
    limit: int | None = None,
) -> Made:
    """The inputs of `workload` on `device`, the same for the same `seed`.

    Skip if inputs and outputs take more than `limit` bytes (None: half of what is free), FormatError for a blob that is
    damaged or of another shape or dtype, KcapError for a Workload that is none of the Definition's, or whose missing
    blob has integers that no rule knows, `Broken` for a constraint that does not hold.
    """
    where = f"{definition.name} {workload.uuid}"
    if reasons := check_workload(definition, workload):
        raise KcapError(f"{where}: {reasons[0]}")
    draft = _draft(definition, workload, dataset, seed)
    _check(draft, where)
    _decide(draft, where)
    valid.shrink(draft)
    _check_size(draft, memory.free(device) * SHARE if limit is None else limit)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = {name: _place(draft, name, generator) for name in definition.inputs}
    _check(draft, where, inputs)
    return Made(list(inputs.values()), draft.notes(), draft.axes, {name: _origin(draft, name) for name in inputs})


def _origin(draft: Draft, name: str) -> Literal["given", "ruled", "drawn"]:
    if name in draft.given:
        return "given"
    return "drawn" if draft.made.get(name) is None else "ruled"


def _draft(definition: Definition, workload: Workload, dataset: Dataset | None, seed: int) -> Draft:
    axes = {name: size for name, size in workload.axes.items() if name not in definition.const_axes}
    found = given.read(definition, workload, dataset)
    return Draft(definition, axes, found.values, torch.Generator().manual_seed(seed), _make, found.missing)


def _check(draft: Draft, where: str, inputs: dict[str, Any] | None = None) -> None:
    """Check the constraints; those that speak of axes alone while there are no inputs yet."""
    sizes = {**draft.axes, **draft.definition.const_axes}
    stated = draft.definition.constraints
    left_out = {name for name, value in draft.given.items() if value is None}
    stated = [text for text in stated if not constraints.names(text) & left_out]
    if inputs is None:
        stated = [text for text in stated if constraints.names(text) <= sizes.keys()]
    constraints.check(stated, {**sizes, **(inputs or {})}, where)


def _decide(draft: Draft, where: str) -> None:
    """Make every integer input. One that no rule knows is drawn small, as replay draws it, unless it had a file."""
    for name, tensor in draft.definition.inputs.items():
        if tensor.shape is None or not _index(tensor) or draft[name] is not None or name in draft.given:
            continue
        if name in draft.missing:
            raise KcapError(f"{where}: inputs.{name}: {draft.missing[name]} is not there, and no rule knows its values")
        low, high = SMALL
        draft.made[name] = draft.integers(low, high + 1, draft.shape(name)).to(torch_dtype(tensor.dtype))
        draft.changes.append(f"drawn from {low} to {high}, for no rule knows it: {name}")


def _index(tensor: DefinitionTensor) -> bool:
    return tensor.dtype.startswith("int") and tensor.dtype not in DATA_ONLY


def _make(draft: Draft, name: str) -> torch.Tensor | None:
    """The input `name` by the first rule that makes it; None if none does."""
    for rule in valid.rules_for(draft.definition.op_type, name):
        if (made := rule.make(draft, name)) is not None:
            draft.ruled.append(name)
            return made.reshape(draft.shape(name)).to(torch_dtype(draft.definition.inputs[name].dtype))
    return None


def _check_size(draft: Draft, limit: float) -> None:
    if (needed := draft.nbytes()) > limit:
        raise Skip(f"its tensors take {needed / memory.GIB:.3g} GiB, the limit is {limit / memory.GIB:.3g} GiB")


def _place(draft: Draft, name: str, generator: torch.Generator) -> Any:
    """The input `name` as the kernel takes it; drawn if nothing is known of it."""
    if draft.definition.inputs[name].shape is None or draft.given.get(name, draft) is None:
        return draft.given[name]
    made = draft[name]
    if made is None:
        return draw(draft.shape(name), draft.definition.inputs[name].dtype, generator)
    return made.to(generator.device)

"""A group as a Definition, and its Calls' invocations under the Definition's names.

Names are `{operator}_{overload}_{dtypes}_{constant sizes}`, `inplace` for an underscore at the end:
`mean_dim_f32_d4096`, `copy_inplace_bf16`. The op_type is the operator's name without overload and underscores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch

from kcap.schemas.families.form import Form, Slot, dtype_name
from kcap.schemas.families.generic_axes import constraints
from kcap.schemas.families.generic_group import Group
from kcap.schemas.families.generic_outputs import Output, flatten, named
from kcap.schemas.families.generic_pattern import Number, Path, Tensor
from kcap.schemas.families.generic_reference import reference
from kcap.schemas.families.invocation import Invocation, Unrecognized
from kcap.schemas.signature import word
from kcap.schemas.values import TensorSpec

MOST_CONSTANTS = 4  # sizes in a name
LONGEST_NAME = 100


@dataclass(frozen=True)
class Generic:
    """The Form of a group's Calls; `bind` puts an invocation into it."""

    group: Group

    @cached_property
    def form(self) -> Form:
        """Without values."""
        inputs = {name: Slot(shape, leaf.dtype, None, self._told(leaf)) for name, shape, leaf in self._tensors()}
        inputs |= {named(number.path): Slot(None, self._number(number), None) for number in self.group.scalars}
        text, tags = reference(self.group, list(inputs))
        return Form(
            name=self._name(),
            op_type=self.group.signature.op_type,
            axes=self._axes(inputs),
            inputs=inputs,
            outputs={output.name: Slot(shape, output.dtype, None) for output, shape in self.group.outputs},
            reference=text,
            description=self._description(),
            tags=tags,
            constraints=constraints(self.group.axes),
        )

    def bind(self, call: Invocation) -> Form:
        """`call` in the Definition's names; Unrecognized if its tensors are others."""
        values = [_tensor(call, leaf) for _, _, leaf in self._tensors()]
        values += [_scalar(call, number) for number in self.group.scalars]
        slots = zip(self.form.inputs.items(), values, strict=True)
        outputs = {
            o.name: replace(self.form.outputs[o.name], value=self._output(call, o)) for o, _ in self.group.outputs
        }
        form = replace(self.form, inputs={n: replace(s, value=v) for (n, s), v in slots}, outputs=outputs)
        form.check()
        return form

    def _output(self, call: Invocation, output: Output) -> Any:
        if output.path:
            return lambda: _at(call, output.path)
        return lambda: flatten(call.result, self.group.signature.several)[output.place]

    def _tensors(self) -> Iterator[tuple[str, tuple[str, ...], Tensor]]:
        """Each input tensor's name and axes."""
        names = iter(self.group.axes.names)
        for leaf in self.group.signature.inputs:
            yield self.group.signature.tensors[leaf.path], tuple(islice(names, leaf.rank)), leaf

    def _axes(self, inputs: dict[str, Slot]) -> dict[str, int | None]:
        shapes = [slot.shape or () for slot in inputs.values()] + [shape for _, shape in self.group.outputs]
        names = dict.fromkeys(axis for shape in shapes for axis in shape)
        return {name: None if name in self.group.axes.variable else int(name.removeprefix("d")) for name in names}

    def _number(self, number: Number) -> str:
        """A number of a kind not known is an integer where all tensors are."""
        kind = number.type
        if kind == "number":
            floats = any(getattr(torch, leaf.dtype).is_floating_point for _, _, leaf in self._tensors())
            kind = "float" if floats else "int"
        return "int64" if kind == "int" else "float32"

    def _name(self) -> str:
        kinds = [leaf.dtype for leaf in self.group.signature.inputs] + [
            output.dtype for output, _ in self.group.outputs
        ]
        sizes = dict.fromkeys(name for name in self.group.axes.names if name not in self.group.axes.variable)
        parts = [self.group.signature.title, *dict.fromkeys(map(word, kinds)), *list(sizes)[:MOST_CONSTANTS]]
        return "_".join(parts)[:LONGEST_NAME]

    def _description(self) -> str:
        own, tensors = self.group.signature.own, self.group.signature.leaves
        lines = [f"{own.name}, as {len(self.group.members)} distinct Calls made it."]
        if len({leaf.device for _, leaf in tensors}) > 1:
            lines.append(
                f"Between devices: {', '.join(f'{named(leaf.path)} on {leaf.device}' for _, leaf in tensors)}."
            )
        return " ".join(lines)

    @cached_property
    def _layouts(self) -> list[tuple[TensorSpec, ...]]:
        """Of each tensor of the pattern, its layout in each Call."""
        return list(zip(*([spec for _, spec in member.call.tensors()] for member in self.group.members), strict=True))

    def _told(self, leaf: Tensor) -> str | None:
        """How a tensor lies in memory, which no Definition's axes say."""
        place = [known for _, known in self.group.signature.leaves].index(leaf)
        strided = [spec for spec in self._layouts[place] if spec.strides is not None]
        if not strided:
            return None
        how = "Broadcast (stride 0)" if any(0 in (spec.strides or ()) for spec in strided) else "Not contiguous"
        return f"{how} in {len(strided)} of {len(self.group.members)} Calls."


def _at(call: Invocation, path: Path) -> Any:
    """The argument at `path`; Unrecognized if there is none."""
    found = call[str(path[0])]
    for index in path[1:]:
        if not isinstance(found, list | tuple) or not isinstance(index, int) or index >= len(found):
            raise Unrecognized(f"{call.operator} has no argument {named(path)}")
        found = found[index]
    return found


def _tensor(call: Invocation, leaf: Tensor) -> torch.Tensor:
    found = _at(call, leaf.path)
    if not isinstance(found, torch.Tensor) or dtype_name(found.dtype) != leaf.dtype:
        raise Unrecognized(f"{call.operator}: {named(leaf.path)} is no tensor of {leaf.dtype}")
    return found


def _scalar(call: Invocation, number: Number) -> Any:
    """The number, or a function that says that no Sample tells it."""
    found = _at(call, number.path)
    return found if isinstance(found, int | float) else partial(_untold, call.operator, named(number.path))


def _untold(operator: str, name: str) -> Any:
    raise Unrecognized(f"{operator}: {name} differs from call to call, and no Sample tells it")

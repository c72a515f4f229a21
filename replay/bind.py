"""Join a Call with one Sample: every scalar known, every offset known, integer values at hand, nothing allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kcap.replay.skip import Skip
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.recording import Argument, Call, Sample, SampledTensor
from kcap.schemas.values import Drift, TensorSpec, Value, tensors

Load = Callable[[SampledTensor], "torch.Tensor | None"]


@dataclass
class Bound:
    """A Call whose arguments are all decided. Keys of `contents` and `ranges` are argument paths (`"3"`, `"2.1"`).

    `contents` holds integer tensors' values (on the CPU, of the tensor's shape or of its leading part);
    `ranges` the smallest and largest value where the values themselves were not kept.
    """

    operator: str
    args: list[Argument]
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.operator.split("::")[0]

    @property
    def base(self) -> str:
        """The operator's name without namespace, overload and the mark of an in-place variant."""
        return self.operator.split("::")[-1].split(".")[0].rstrip("_")

    def index(self, name: str) -> int | None:
        return next((i for i, argument in enumerate(self.args) if argument.name == name), None)

    def __getitem__(self, name: str) -> Value:
        """The Value of the argument called `name`; None if the Call has none of that name."""
        index = self.index(name)
        return None if index is None else self.args[index].value

    def spec(self, name: str) -> TensorSpec:
        """The tensor called `name`; Skip if the argument is no tensor."""
        value = self[name]
        if not isinstance(value, TensorSpec):
            raise Skip(f"its argument '{name}' is not a tensor")
        return value

    def integer(self, name: str) -> int:
        value = self[name]
        if not isinstance(value, int):
            raise Skip(f"its argument '{name}' is not an integer")
        return value

    def content(self, name: str) -> torch.Tensor | None:
        """The values decided for the integer tensor called `name`."""
        return self.contents.get(str(self.index(name)))

    def set_content(self, name: str, values: torch.Tensor) -> None:
        self.contents[str(self.index(name))] = values

    def set_value(self, name: str, value: Value) -> None:
        """Give the argument called `name` another Value, if the Call has such an argument."""
        index = self.index(name)
        if index is not None:
            self.args[index] = self.args[index].model_copy(update={"value": value})

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        return tensors([argument.value for argument in self.args])

    def holder(self, path: str) -> Argument:
        """The argument in which the tensor at `path` is."""
        return self.args[int(path.split(".")[0])]

    def integers(self) -> Iterator[tuple[str, TensorSpec]]:
        """The integer tensors among the arguments, with their paths."""
        return ((path, spec) for path, spec in self.tensors() if BY_NAME[spec.dtype].kind == "int")


def bind(call: Call, sample: Sample | None, schema: Any | None, load: Load) -> Bound:
    """`call` with the values that `sample` holds; Skip if a drifting value has none."""
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    args = [_named(argument, index, names) for index, argument in enumerate(call.args)]
    args = [a.model_copy(update={"value": _decide(a.value, str(i), sample)}) for i, a in enumerate(args)]
    bound = Bound(call.operator, args)
    for path, kept in (sample.tensors if sample else {}).items():
        if (values := load(kept)) is not None:
            bound.contents[path] = values
        if kept.low is not None and kept.high is not None:
            bound.ranges[path] = (kept.low, kept.high)
    return bound


def _named(argument: Argument, index: int, names: list[str]) -> Argument:
    """A positional argument without a name takes its schema's."""
    if argument.name is not None or argument.keyword or index >= len(names):
        return argument
    return argument.model_copy(update={"name": names[index]})


def _decide(value: Value, path: str, sample: Sample | None) -> Value:
    if isinstance(value, list):
        return [_decide(item, f"{path}.{index}", sample) for index, item in enumerate(value)]
    if isinstance(value, Drift):
        if sample is None or path not in sample.scalars:
            raise Skip(f"no Sample holds the value of its argument {path}")
        return sample.scalars[path]  # type: ignore[no-any-return]
    if isinstance(value, TensorSpec) and value.offset is None:
        if sample is None or path not in sample.offsets:
            raise Skip(f"no Sample holds the storage offset of its argument {path}")
        return replace(value, offset=sample.offsets[path])
    return value

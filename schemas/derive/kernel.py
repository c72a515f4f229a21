"""A recorded Call as a kernel: named inputs and outputs over named axes, with a reference in PyTorch.

`DerivedDefinition` is a Definition with the Calls that it was derived from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from pydantic import ValidationError

from kcap.schemas.derive.invocation import Invocation, Unrecognized
from kcap.schemas.flashinfer.definition import IN_PLACE, AxisConst, AxisVar, Definition, DefinitionTensor, DType
from kcap.schemas.flashinfer.descriptions import describe_axis, describe_tensor
from kcap.schemas.recording.records import Call

LazyValue = Callable[[], Any]


@dataclass(frozen=True)
class TensorArg:
    """An input or output: its axes (None: a Python scalar), its dtype by torch's name, and its value.

    `value`: a tensor, a number, or a function without arguments that makes it: where it needs values (of a block
    table), or is an output, which is known once the operator ran. `any_bits`: of integers, that all are valid.
    """

    shape: tuple[str, ...] | None
    dtype: str
    value: Any
    description: str | None = None
    any_bits: bool = False

    def get(self) -> Any:
        """The value; a function is called, and may raise Unrecognized where values are not known."""
        return self.value() if callable(self.value) else self.value


@dataclass(frozen=True)
class OperatorFacts:
    """What the engine's operator does that its Definition does not say; names are of the operator's arguments.

    `hints`: arguments that change how it computes, and not what. `unwritten`: those that its schema calls written, and
    that it does not write. `returned`: what it returns, in tensors without data; None where torch knows that.
    `lengths`: an input of the Definition whose zeros are padding: the operator leaves those rows as they were.
    """

    hints: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    returned: Callable[[], list[torch.Tensor]] | None = None
    lengths: str = ""


@dataclass(frozen=True)
class KernelInstance:
    """One Call as a kernel of a family. `axes`: a number is constant in the model, None varies.

    `reference` is the text of a module with `run(*inputs) -> outputs`. `flops` counts a multiplication and an addition
    as two; `touched`: bytes that one invocation must read and write, None: all of its inputs and outputs. `random`: it
    draws random numbers, so that two runs agree only in distribution. `in_place`: inputs that may be written, and the
    output of each, where the names do not say so (`Definition.written_inputs`). `engine_form`: the same kernel with the
    engine's own arguments for inputs, where this one's are computed from their values; or why it has no such form.
    """

    name: str
    op_type: str
    axes: dict[str, int | None]
    inputs: dict[str, TensorArg]
    outputs: dict[str, TensorArg]
    reference: str
    description: str | None = None
    tags: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    flops: LazyValue | int = 0
    touched: LazyValue | None = None
    random: bool = False
    in_place: tuple[tuple[str, str], ...] = ()
    operator: OperatorFacts = field(default=OperatorFacts(), compare=False)
    engine_form: KernelInstance | str | None = field(default=None, compare=False)
    family: str = field(default="", compare=False)

    @property
    def key(self) -> Hashable:
        """What two Calls of one Definition share."""
        args = [(n, arg.shape, arg.dtype) for n, arg in (*self.inputs.items(), *self.outputs.items())]
        return self.name, tuple(self.axes.items()), tuple(args), self.reference, self.constraints

    def check(self) -> None:
        """Unrecognized if the inputs disagree about an axis, or no Definition can hold it."""
        self.sizes()
        self.definition()
        if isinstance(self.engine_form, KernelInstance):
            self.engine_form.definition()

    def definition(self) -> Definition:
        """The FlashInfer-Bench Definition; Unrecognized if none can hold this kernel: its name is too long, say."""
        shapes = {name: arg.shape for name, arg in (*self.inputs.items(), *self.outputs.items())}
        axes: dict[str, AxisConst | AxisVar] = {}
        try:
            for name, size in self.axes.items():
                text = describe_axis(name, shapes)
                axes[name] = AxisVar(description=text) if size is None else AxisConst(value=size, description=text)
            return Definition(
                name=self.name,
                op_type=self.op_type,
                axes=axes,
                inputs={name: _definition_tensor(name, arg, False) for name, arg in self.inputs.items()},
                outputs={name: _definition_tensor(name, arg, True) for name, arg in self.outputs.items()},
                reference=self.reference,
                description=self.description or f"{self.op_type}, as it was recorded.",
                tags=sorted({*self.tags, *(f"{IN_PLACE}{name}={out}" for name, out in self.in_place)}),
                constraints=list(self.constraints),
            )
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "its parts"
            raise Unrecognized(f"no Definition can hold it: {place}: {first['msg']}") from None

    def sizes(self, values: dict[str, Any] | None = None) -> dict[str, int]:
        """Every axis that the inputs decide, from `values` where given; Unrecognized if two of them disagree.

        Without `values`, lazy inputs are skipped.
        """
        sizes = {name: size for name, size in self.axes.items() if size is not None}
        for name, arg in self.inputs.items():
            value = arg.value if values is None else values[name]
            if arg.shape is None or callable(value):
                continue
            _bind_axes(sizes, name, arg.shape, tuple(value.shape))
        return sizes


def _definition_tensor(name: str, arg: TensorArg, is_output: bool) -> DefinitionTensor:
    shape = None if arg.shape is None else list(arg.shape)
    description = arg.description or describe_tensor(name, is_output)
    return DefinitionTensor(shape=shape, dtype=cast(DType, arg.dtype), description=description)


def _bind_axes(sizes: dict[str, int], name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if len(axes) != len(shape):
        raise Unrecognized(f"input {name} has {len(shape)} dimensions, not {len(axes)}")
    for axis, size in zip(axes, shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            raise Unrecognized(f"axis {axis} would be {sizes[axis]} and, by input {name}, {size}")


def tensor_arg(tensor: torch.Tensor, *axes: str, description: str | None = None) -> TensorArg:
    """An argument whose tensor exists already."""
    return TensorArg(axes, dtype_name(tensor.dtype), tensor, description)


def packed_arg(tensor: torch.Tensor, *axes: str, description: str) -> TensorArg:
    """A packed weight, or its zero points: integers that any bits are."""
    return TensorArg(axes, dtype_name(tensor.dtype), tensor, description, any_bits=True)


def lazy_arg(
    dtype: torch.dtype | str, axes: tuple[str, ...], value: LazyValue, description: str | None = None
) -> TensorArg:
    """An argument whose tensor is made on demand: from values (index inputs) or the operator's result (outputs)."""
    return TensorArg(axes, dtype if isinstance(dtype, str) else dtype_name(dtype), value, description)


def scalar_arg(value: Any, dtype: str = "float32", description: str | None = None) -> TensorArg:
    return TensorArg(None, dtype, value, description)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def abbreviate(dtype: torch.dtype, usual: torch.dtype) -> str:
    """A dtype in a name: nothing for the family's usual one, else `_bf16`, `_fp16`, `_fp32` …"""
    words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return "" if dtype == usual else f"_{words.get(dtype, dtype_name(dtype))}"


BindInvocation = Callable[[Invocation], KernelInstance]


@dataclass(frozen=True)
class CallUse:
    """A Call of a Definition. `bind` gives an invocation the Definition's names, or raises Unrecognized."""

    call: Call
    bind: BindInvocation


@dataclass(frozen=True)
class DerivedDefinition:
    """A Definition and the Calls that it was derived from. `family`: whose work they do; empty if that is unknown."""

    definition: Definition
    family: str
    uses: tuple[CallUse, ...]

    @property
    def total(self) -> int:
        return sum(use.call.total for use in self.uses)

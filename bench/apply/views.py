"""Where a Definition's inputs and outputs lie in what the engine passes: views of tensors, without copies.

Told from the Call alone, on tensors without data: the Definition's binding makes each input from the arguments, and
what it makes is a view of one of them, a number, or neither. The last has no place in a plan: an input that is computed
from values (the indices of pages from a block table) would have to be computed anew in each step. Such a Call may have
another Definition, of the engine's own arguments (`Derived.engine_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kcap.errors import first_line
from kcap.replay.rebuild.operators import TORCH_NAMESPACES, resolve_operator
from kcap.schemas.derive.families import REFUSALS, why_not_taken
from kcap.schemas.derive.invocation import Invocation, Unrecognized, argument_names, invocation_of
from kcap.schemas.derive.kernel import CallUse, KernelInstance, TensorArg, dtype_name
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import TensorSpec, TorchConstant
from kcap.schemas.results.plan import NewTensor, Padding, Scalar, TensorView

POOLS = frozenset({"num_pages", "num_states"})  # axes whose size is what memory allows, not what is computed


class NoView(Exception):
    """The Definition's inputs or outputs are no views of what the engine passes; the message is the reason."""


@dataclass(frozen=True)
class Views:
    """As in `kcap.schemas.results.plan.Replacement`."""

    inputs: list[TensorView | Scalar]
    outputs: list[TensorView]
    returned: list[NewTensor | TensorView]
    several: bool
    hints: list[str]
    padding: Padding | None


def views_of(definition: Definition, use: CallUse) -> Views:
    """How `use.call` holds the Definition's inputs and outputs; NoView where it does not."""
    if use.call.shapes > 1:
        raise NoView(f"it stands for {use.call.shapes} signatures, of which one alone is known")
    try:
        return _views(definition, use)
    except REFUSALS as error:
        raise NoView(why_not_taken(error)) from None


def _views(definition: Definition, use: CallUse) -> Views:
    call, invocation = use.call, invocation_of(use.call)
    form = use.bind(invocation)
    owners = dict(_owners(call, invocation))
    inputs = [_input(name, form.inputs[name], owners) for name in definition.inputs]
    result, form = _with_result(use, invocation, form)
    returned = [_returned(tensor, owners) for tensor in result.tensors]
    owners = {_storage(tensor): ("", index, tensor) for index, tensor in enumerate(result.tensors)} | owners
    outputs = [_output(name, form.outputs[name], owners) for name in definition.outputs]
    _check_all_written(call, form.operator.unwritten, returned, outputs)
    hints = [str(index) for index, name in enumerate(argument_names(call)) if name in form.operator.hints]
    return Views(inputs, outputs, returned, result.several, hints, _padding(definition, form, inputs))


@dataclass(frozen=True)
class _Result:
    tensors: Sequence[torch.Tensor] = ()
    several: bool = False


def _with_result(use: CallUse, invocation: Invocation, form: KernelInstance) -> tuple[_Result, KernelInstance]:
    """What the operator returns, where an output is made of that, and the form that knows it."""
    if not all(map(_is_known, form.outputs.values())):
        returned = form.operator.returned
        invocation.result = _run_without_data(use.call, invocation) if returned is None else returned()
        several = isinstance(invocation.result, tuple | list)
        tensors = tuple(invocation.result) if several else (invocation.result,)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise NoView("it returns something beside tensors")
        return _Result(tensors, several), use.bind(invocation)
    return _Result(), form


def _is_known(output: TensorArg) -> bool:
    """Whether it is among the arguments."""
    try:
        return output.get() is not None
    except (AttributeError, KeyError, TypeError):  # of None, which stands for what is not known yet
        return False


def _run_without_data(call: Call, invocation: Invocation) -> Any:
    """What torch says that its own operator returns."""
    if call.namespace not in TORCH_NAMESPACES:
        raise NoView("what it returns is not recorded, and torch does not know it")
    values = [_on_meta(invocation.arguments[name]) for name in argument_names(call)]
    positional = [value for value, argument in zip(values, call.args, strict=True) if not argument.keyword]
    named = {a.name: value for value, a in zip(values, call.args, strict=True) if a.keyword and a.name}
    try:
        return resolve_operator(call.operator).call(*positional, **named)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise NoView(f"what it returns depends on values ({first_line(error)})") from None


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, TorchConstant) and value.kind == "device" else value


def _returned(tensor: torch.Tensor, owners: Owners) -> NewTensor | TensorView:
    """A result of the operator: an argument, or new."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if (owner := owners.get(_storage(tensor))) is None:
        return NewTensor(shape=shape, strides=strides, dtype=dtype_name(tensor.dtype))
    path, _, whole = owner
    offset = tensor.storage_offset() - whole.storage_offset()
    return TensorView(argument=path, shape=shape, strides=strides, offset=offset)


def _padding(definition: Definition, form: KernelInstance, inputs: Sequence[TensorView | Scalar]) -> Padding | None:
    name = form.operator.lengths
    if not name:
        return None
    lengths, (axis,) = inputs[list(definition.inputs).index(name)], form.inputs[name].shape or ()
    assert isinstance(lengths, TensorView)
    shapes = [form.outputs[output].shape or () for output in definition.outputs]
    return Padding(lengths=lengths, dims=[shape.index(axis) if axis in shape else None for shape in shapes])


def _check_all_written(
    call: Call,
    unwritten: Collection[str],
    returned: Sequence[NewTensor | TensorView],
    outputs: Sequence[TensorView],
) -> None:
    """NoView where the operator writes or returns what is no output of the Definition."""
    written = {view.argument.partition(".")[0] for view in outputs if view.argument is not None}
    for index, (name, argument) in enumerate(zip(argument_names(call), call.args, strict=True)):
        if (
            argument.written
            and isinstance(argument.value, TensorSpec)
            and {name, str(index)}.isdisjoint({*unwritten, *written})
        ):
            raise NoView(f"it writes its argument {name}, which is no output of the Definition")
    new = {index for index, one in enumerate(returned) if isinstance(one, NewTensor) and 0 not in one.shape}
    if missing := new - {view.result for view in outputs}:
        raise NoView(f"result {missing.pop()} is no output of the Definition")


Owners = Mapping[int, tuple[str, int, torch.Tensor]]  # of a storage: an argument's path or a result's position, tensor


def _owners(call: Call, invocation: Invocation) -> Iterator[tuple[int, tuple[str, int, torch.Tensor]]]:
    for index, name in enumerate(argument_names(call)):
        for path, tensor in _tensors(invocation.arguments[name], str(index)):
            yield _storage(tensor), (path, -1, tensor)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _get(name: str, get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Unrecognized as error:
        raise NoView(f"{name} is computed from values: {error}") from None


def _input(name: str, arg: TensorArg, owners: Owners) -> TensorView | Scalar:
    value = _get(name, arg.get)
    if isinstance(value, torch.Tensor):
        return _view(name, arg, value, owners)
    if isinstance(value, bool | int | float):
        return Scalar(scalar=value)
    raise NoView(f"{name} is no number that stays: {value!r}")


def _output(name: str, arg: TensorArg, owners: Owners) -> TensorView:
    return _view(name, arg, _get(name, arg.get), owners)


def _view(name: str, arg: TensorArg, tensor: torch.Tensor, owners: Owners) -> TensorView:
    owner = owners.get(_storage(tensor))
    if owner is None or tensor.dtype != owner[2].dtype:
        raise NoView(f"{name} is a copy of what the engine passes, in another layout or dtype")
    if dtype_name(tensor.dtype) != arg.dtype:
        raise NoView(f"{name} is {dtype_name(tensor.dtype)} in the engine, and {arg.dtype} in the Definition")
    path, result, whole = owner
    return TensorView(
        argument=path or None,
        result=None if path else result,
        shape=[_size(arg, tensor, dim, whole) for dim in range(tensor.dim())],
        strides=list(tensor.stride()),
        offset=tensor.storage_offset() - whole.storage_offset(),
    )


def _size(arg: TensorArg, tensor: torch.Tensor, dim: int, whole: torch.Tensor) -> int:
    """As in a TensorView: of a cache's pages the dimension of the engine's tensor that they are."""
    size = int(tensor.shape[dim])
    if arg.shape is None or arg.shape[dim] not in POOLS:
        return size
    same = (d for d in range(whole.dim()) if whole.shape[d] == size and whole.stride(d) == tensor.stride(dim))
    return -1 - next(same, -1 - size)

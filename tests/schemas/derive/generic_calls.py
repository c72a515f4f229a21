"""Hand-made Calls of operators that no family knows, and whether their Definitions hold what the operators do."""

from __future__ import annotations

from typing import Any

import torch

from kcap.bench.check.checker import as_list, compare_outputs, copy_of
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.derive.generic.derive import derive_generic
from kcap.schemas.derive.generic.pattern import registered_operator
from kcap.schemas.derive.invocation import Invocation, schema_names
from kcap.schemas.derive.kernel import CallUse, DerivedDefinition
from kcap.schemas.flashinfer.definition import Definition, check_definition, from_bytes, to_bytes
from kcap.schemas.recording.records import Argument, Call, Count
from kcap.schemas.recording.values import TensorSpec, TorchConstant, contiguous_strides


def call(name: str, *args: Any, id: int = 0, **kwargs: Any) -> Call:
    """The Call of `name` with these real arguments, named as torch's schema has them."""
    arguments = [Argument(name=n, value=value(a)) for n, a in zip(schema_names(name), args, strict=False)]
    arguments += [Argument(name=n, value=value(a), keyword=True, written=n == "out") for n, a in kwargs.items()]
    return Call(id=id, operator=name, args=arguments, counts=[Count(phase="decode", count=1)])


def value(argument: Any) -> Any:
    """`argument` as a recorded Value."""
    match argument:
        case torch.Tensor():
            strides = None if argument.stride() == contiguous_strides(tuple(argument.shape)) else argument.stride()
            return TensorSpec(tuple(argument.shape), str(argument.dtype).removeprefix("torch."), strides)
        case torch.dtype():
            return TorchConstant("dtype", str(argument).removeprefix("torch."))
        case list():
            return [value(item) for item in argument]
    return argument


def derive(*calls: Call) -> tuple[list[DerivedDefinition], dict[int, str]]:
    return derive_generic([c.model_copy(update={"id": i}) for i, c in enumerate(calls)], None)


def derived(name: str, *invocations: tuple[Any, ...], **kwargs: Any) -> Definition:
    """The one Definition of these invocations, after its reference gave what the operator gives for each."""
    kernels, refused = derive(*(call(name, *args, **kwargs) for args in invocations))
    assert not refused
    (kernel,) = kernels
    check(kernel, name, list(invocations), kwargs)
    return kernel.definition


def check(kernel: DerivedDefinition, name: str, invocations: list[tuple[Any, ...]], kwargs: dict[str, Any]) -> None:
    """The kernel's Definition is valid, and its reference gives what the operator does, for each of its Calls."""
    definition = kernel.definition
    assert from_bytes(to_bytes(definition)) == definition
    assert check_definition(definition) == []
    for use in kernel.uses:
        agrees(definition, use, name, invocations[use.call.id], kwargs)


def agrees(definition: Definition, use: CallUse, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args, kwargs = tuple(copied_all(a) for a in args), {n: copied_all(a) for n, a in kwargs.items()}
    invocation = Invocation(name, dict(zip(schema_names(name), args, strict=False)) | kwargs)
    instance = use.bind(invocation)
    inputs = {n: copy_of(arg.get()) for n, arg in instance.inputs.items()}
    sizes = instance.sizes(inputs)
    expected = as_list(compile_reference(definition.reference, definition.name)(*inputs.values()))
    own = registered_operator(name).call
    assert own is not None
    invocation.result = own(*args, **kwargs)
    actual = [arg.get() for arg in instance.outputs.values()]
    assert [tuple(tensor.shape) for tensor in actual] == [
        definition.sizes(tensor.shape or [], sizes) for tensor in definition.outputs.values()
    ]
    wanted = [f"torch.{tensor.dtype}" for tensor in definition.outputs.values()]
    assert [str(tensor.dtype) for tensor in expected] == [str(tensor.dtype) for tensor in actual] == wanted
    result = compare_outputs(instance, actual, expected)
    assert result["status"] == "agrees", (definition.reference, result)


def copied_all(argument: Any) -> Any:
    return [copied_all(item) for item in argument] if isinstance(argument, list) else copy_of(argument)

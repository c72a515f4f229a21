"""Fused kernels: run with their references on the same rebuilt inputs, or made of a few operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from kcap.bench.accuracy import difference
from kcap.bench.check.checker import as_list
from kcap.replay.datasets.reference import compile_reference
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.fragment.reference import FragmentReference, reference_from, reference_of
from kcap.schemas.recording.recording import Argument, Call, Launch, Recording, Sample
from kcap.schemas.recording.values import TensorSpec

SEED = 7


def errors(call: Call, recording: Recording, device: str = "cpu", seed: int = SEED) -> list[float]:
    """Of each output, the greatest error in units of what is allowed; the reference runs first, on copies."""
    found = reference_of(call, recording)
    assert isinstance(found, FragmentReference), found
    rebuilder = Rebuilder(device, device, recording.path)
    decided = rebuilder.resolve(call, sample_of(call, recording))
    torch.manual_seed(seed)
    args = rebuilder.build(decided).args
    given = [args[int(port.path)].clone() for port in found.inputs]
    expected = as_list(compile_reference(found.source, "fused")(*given))
    decided.operator.call(*args)
    pairs = zip(found.outputs, expected, strict=True)
    return [error(args[int(port.path)], reference, port.shape) for port, reference in pairs]


def error(actual: Any, expected: Any, shape: tuple[int, ...]) -> float:
    assert tuple(expected.shape) == shape
    return difference(actual.cpu(), expected.cpu()).error


def sample_of(call: Call, recording: Recording) -> Sample | None:
    return next((sample for sample in recording.samples if sample.call == call.id), None)


def tensor(name: str, *shape: int, dtype: str = "float32") -> Argument:
    return Argument(name=name, value=TensorSpec(shape, dtype, storage=int(name[-1])))


def launched(*args: Argument) -> Call:
    return Call(id=0, operator="triton::fused.s01234567", args=list(args), launch=Launch(function="fused"))


LIKE = 'Tensor "f32[s0, 4][4, 1]cuda:0"'
A, B = (f"%{name} : {LIKE} = PlaceHolder[target={name}]\n" for name in "ab")
SUB = f"%sub : {LIKE}[num_users=1] = call_function[target=torch.ops.aten.sub.Tensor](args = (%a, %b), kwargs = {{}})\n"


def computed(call: Call, fragment: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the reference makes of `inputs`; of these it may give none back."""
    reference = reference_from(call, fragment)
    assert isinstance(reference, FragmentReference), reference
    results = as_list(compile_reference(reference.source, "fused")(*inputs))
    assert not {result.data_ptr() for result in results} & {tensor.data_ptr() for tensor in inputs}
    return list(results)


def holding(fragment: str) -> Recording:
    return cast(Recording, SimpleNamespace(fragment=lambda launch: fragment))

"""Runs a fused kernel and its reference on the same rebuilt inputs."""

from __future__ import annotations

from typing import Any

import torch

from kcap.bench.accuracy import difference
from kcap.bench.check.checker import as_list
from kcap.replay.datasets.reference import compile_reference
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.fragment.reference import FragmentReference, reference_of
from kcap.schemas.recording.recording import Call, Recording, Sample

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

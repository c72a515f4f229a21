"""Weights (and caches) of a size that numbers survive: those of a Program flow from Call to Call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch

from kcap.replay.bind import Bound
from kcap.replay.layout import Target, key_of, torch_dtype
from kcap.replay.memory import Key
from kcap.schemas.values import TensorSpec

MULTIPLIED = ("bfloat16", "float16", "float32")


def shrink(bound: Bound, target: Target, buffers: Mapping[Key, torch.Tensor], parameters: Collection[Key]) -> None:
    """Make weights of standard normal numbers, so that their product with such numbers has about the same size.

    Else numbers overflow after some layers, and kernels are faster on nan, or slower on inf. By a power of two: the
    mantissas, on which a product's power depends, stay.
    """
    for spec, key in matrices(bound, target):
        if key in parameters:
            rows, columns = spec.shape[-2:]
            buffers[key].view(torch_dtype(spec.dtype)).mul_(2.0 ** -round(math.log2(rows * columns) / 4))


def matrices(bound: Bound, target: Target) -> Iterator[tuple[TensorSpec, Key]]:
    """The matrices of floats, or stacks of them, that have a storage for themselves."""
    specs = [(spec, key_of(spec, target)) for _, spec in bound.tensors()]
    times = Counter(key for _, key in specs)
    for spec, key in specs:
        if spec.dtype in MULTIPLIED and len(spec.shape) in (2, 3) and times[key] == 1 and spec.numel:
            yield spec, key

"""Where a tensor lies: the device it is rebuilt on, its storage, and its view of that storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kcap.replay.memory import Key, place
from kcap.replay.skip import Skip
from kcap.schemas import dtypes
from kcap.schemas.values import TensorSpec


@dataclass(frozen=True)
class Target:
    """Where to rebuild: tensors recorded on `home` (`cuda` or `cpu`) go to `device`."""

    device: str
    home: str


def key_of(spec: TensorSpec, target: Target) -> Key:
    return place(spec.device, target.device, target.home), spec.storage


def tensor(spec: TensorSpec, buffer: torch.Tensor) -> torch.Tensor:
    """A view of `buffer` (bytes of a whole storage) with the shape, strides, offset and dtype of `spec`."""
    return buffer.view(torch_dtype(spec.dtype)).as_strided(spec.shape, spec.effective_strides, spec.offset or 0)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name; Skip if this torch has none."""
    found = dtypes.torch_dtype(name)
    if found is None:
        raise Skip(f"torch {torch.__version__} has no dtype {name}")
    return found


def compact(spec: TensorSpec) -> tuple[int, ...]:
    """The shape without the copies that a stride of zero makes of one element."""
    return tuple(1 if step == 0 else n for n, step in zip(spec.shape, spec.effective_strides, strict=True))

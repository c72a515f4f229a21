"""A Definition and the inputs of a Workload, as its Cost is counted from them. Bytes throughout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kcap.schemas.definition import Definition
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.families.cost import NO_ARITHMETIC, Cost, reach


@dataclass(frozen=True)
class Given:
    """`inputs`: tensors and scalars by the Definition's names; None, or absent, where one is left out."""

    definition: Definition
    inputs: Mapping[str, Any]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor `name`; LookupError if there is none."""
        found = self.inputs.get(name)
        if not isinstance(found, torch.Tensor):
            raise LookupError(f"{self.definition.name} has no tensor {name}")
        return found

    def __contains__(self, name: str) -> bool:
        return isinstance(self.inputs.get(name), torch.Tensor)

    def index(self, name: str) -> torch.Tensor:
        """The index input `name`, on the CPU."""
        return self[name].cpu().long()

    def read(self, *names: str) -> int:
        """Bytes of these inputs, whole."""
        return sum(reach(self[name]) for name in names)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every axis that the inputs decide."""
        found = dict(self.definition.const_axes)
        for name, one in self.definition.inputs.items():
            if name in self and one.shape is not None:
                found.update(zip(one.shape, self[name].shape, strict=False))
        return found

    @cached_property
    def written(self) -> int:
        """Bytes of all outputs; of one whose size is not known, none."""
        outputs = self.definition.outputs.values()
        return sum(self._size(one.shape) * (_bits(one.dtype)) // 8 for one in outputs if one.shape is not None)

    def _size(self, shape: list[str]) -> int:
        return math.prod(self.sizes.get(axis, 0) for axis in shape)

    @property
    def dtype(self) -> str:
        """Of the first input that numbers are computed from."""
        dtypes = [one.dtype for one in self.definition.inputs.values() if one.shape is not None]
        return next((name for name in dtypes if name not in NO_ARITHMETIC), "")

    def cost(self, read: int, flops: int = 0) -> Cost:
        """Of an invocation that reads so many bytes and writes all outputs."""
        return Cost(read + self.written, read, flops, self.dtype)

    def whole(self, flops: int = 0) -> Cost:
        """All of its inputs are read."""
        return self.cost(self.read(*(name for name in self.definition.inputs if name in self)), flops)

    def unread(self) -> Cost:
        """What of its inputs is read is not known."""
        return self.cost(0)


def _bits(dtype: str) -> int:
    return 4 if dtype == "float4_e2m1" else BY_NAME[dtype].bits

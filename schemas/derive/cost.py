"""What one invocation of a kernel cannot do without: bytes moved and FLOPs, of a Call's kernel or a Workload's inputs.

A cost is a lower bound: each input counts once, for what must be read of it, each output once, for what must be
written. What is not known counts nothing. Families register a function for each op_type with `cost_function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kcap.schemas.derive.invocation import Unrecognized
from kcap.schemas.derive.kernel import KernelInstance, TensorArg
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.system.registry import Registry, import_plugins

NO_ARITHMETIC = ("int32", "int64", "bool")  # indices and masks


@dataclass(frozen=True)
class Cost:
    """`bytes`: read and written; `read`: those of them that are certainly of inputs.

    `flops`: a multiplication and an addition are two; 0 where they are not known. `dtype`: of the operands, by torch's
    name.
    """

    bytes: int = 0
    read: int = 0
    flops: int = 0
    dtype: str = ""

    def within(self, inputs: int) -> Cost:
        """The same, reading at most `inputs` bytes: two arguments may be one tensor."""
        unread = max(self.read - inputs, 0)
        return replace(self, bytes=self.bytes - unread, read=self.read - unread)


def cost_of_instance(kernel: KernelInstance) -> Cost:
    """The cost that a family gives its Call; no bytes or no FLOPs where they depend on values that are not known."""
    written = sum(_written_bytes(arg, kernel) for arg in kernel.outputs.values())
    try:
        total = (
            written + sum(_read_bytes(arg) for arg in kernel.inputs.values())
            if kernel.touched is None
            else kernel.touched()
        )
    except Unrecognized:
        total = 0
    return Cost(total, max(total - written, 0), _flops(kernel), arithmetic_dtype(kernel))


def _flops(kernel: KernelInstance) -> int:
    try:
        return kernel.flops() if callable(kernel.flops) else kernel.flops
    except Unrecognized:
        return 0


def arithmetic_dtype(kernel: KernelInstance) -> str:
    """The dtype of the first input that numbers are computed from; "" if there is none."""
    args = [arg for arg in kernel.inputs.values() if arg.shape is not None]
    return next((arg.dtype for arg in args if arg.dtype not in NO_ARITHMETIC), "")


def _read_bytes(arg: TensorArg) -> int:
    value = arg.get() if arg.shape is not None else None
    return distinct_bytes(value) if isinstance(value, torch.Tensor) else 0


def _written_bytes(output: TensorArg, kernel: KernelInstance) -> int:
    """Bytes of an output; of one whose size the inputs do not decide, none."""
    sizes, count = kernel.sizes(), 1
    for axis in output.shape or ():
        count *= sizes.get(axis, 0)
    return count * BY_NAME[output.dtype].bits // 8 if output.dtype in BY_NAME else 0


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of `tensor`, at most: a broadcast dimension counts once."""
    if not tensor.numel():
        return 0
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(min(tensor.numel(), extent) * tensor.element_size())


@dataclass(frozen=True)
class CostInputs:
    """`inputs`: tensors and scalars by the Definition's names; None, or absent, where one is left out."""

    definition: Definition
    inputs: Mapping[str, Any]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor `name`; LookupError if there is none."""
        tensor = self.inputs.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise LookupError(f"{self.definition.name} has no tensor {name}")
        return tensor

    def __contains__(self, name: str) -> bool:
        return isinstance(self.inputs.get(name), torch.Tensor)

    def index(self, name: str) -> torch.Tensor:
        """The index input `name`, on the CPU."""
        return self[name].cpu().long()

    def read(self, *names: str) -> int:
        """Bytes of the whole of these inputs."""
        return sum(distinct_bytes(self[name]) for name in names)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every axis that the inputs decide."""
        sizes = dict(self.definition.const_axes)
        for name, tensor in self.definition.inputs.items():
            if name in self and tensor.shape is not None:
                sizes.update(zip(tensor.shape, self[name].shape, strict=False))
        return sizes

    @property
    def to_no_output(self) -> bool:
        """Whether no output has an element, and nothing need be read."""
        outputs = self.definition.outputs.values()
        return all(any(self.sizes.get(axis) == 0 for axis in output.shape or ()) for output in outputs)

    @cached_property
    def written(self) -> int:
        """Bytes of all outputs; of one whose size is not known, none."""
        outputs = self.definition.outputs.values()
        return sum(
            self._size(output.shape) * (4 if output.dtype == "float4_e2m1" else BY_NAME[output.dtype].bits) // 8
            for output in outputs
            if output.shape is not None
        )

    def _size(self, shape: list[str]) -> int:
        return math.prod(self.sizes.get(axis, 0) for axis in shape)

    @property
    def dtype(self) -> str:
        """The dtype of the first input that numbers are computed from."""
        dtypes = [tensor.dtype for tensor in self.definition.inputs.values() if tensor.shape is not None]
        return next((name for name in dtypes if name not in NO_ARITHMETIC), "")

    def cost(self, read: int, flops: int = 0) -> Cost:
        """The cost of an invocation that reads `read` bytes and writes all outputs."""
        return Cost(read + self.written, read, flops, self.dtype)

    def whole(self, flops: int = 0) -> Cost:
        """The cost if all inputs are read."""
        return self.cost(self.read(*(name for name in self.definition.inputs if name in self)), flops)

    def unread(self) -> Cost:
        """The cost where it is not known what of the inputs is read."""
        return self.cost(0)


CostFunction = Callable[[CostInputs], Cost]
COST_FUNCTIONS: Registry[str, CostFunction] = Registry("op_type with a cost function")


def cost_function(*op_types: str) -> Callable[[CostFunction], CostFunction]:
    """Register a function for these op_types. LookupError from it: an input is missing, and the outputs alone count."""

    def register(function: CostFunction) -> CostFunction:
        for op_type in op_types:
            COST_FUNCTIONS.add(op_type, function)
        return function

    return register


def cost_function_for(op_type: str) -> CostFunction | None:
    """The function registered for `op_type`; None if there is none."""
    import_plugins("kcap.schemas.derive.families")
    return COST_FUNCTIONS.get(op_type)

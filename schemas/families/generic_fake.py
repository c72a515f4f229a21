"""A pattern's operator on tensors without data (torch's FakeTensorMode): what it returns, and of which sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kcap.schemas.families.generic_operator import Operator
from kcap.schemas.families.generic_pattern import Baked, Member, Number, Parameter, Path, Pattern, Tensor
from kcap.schemas.families.invocation import Unrecognized, torch_dtype
from kcap.schemas.values import TorchConstant

WORDS = {
    str(word).removeprefix("torch."): word
    for word in vars(torch).values()
    if isinstance(word, torch.layout | torch.memory_format)
}
UNKNOWN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass
class Arguments:
    """`values` by parameter; `tensors` by path, in the order of the pattern's leaves."""

    values: dict[str, Any]
    tensors: dict[Path, torch.Tensor]


@dataclass(frozen=True)
class Fake:
    """A member's invocation of `target`, which is the pattern's operator or its functional variant."""

    pattern: Pattern
    member: Member
    target: Operator

    def run(
        self, watch: Callable[[Arguments], AbstractContextManager[Any]] = lambda _: nullcontext(), drift: float = 1
    ) -> Any:
        """What `target` returns, on fake tensors; Unrecognized if torch cannot tell without data."""
        assert self.target.call is not None
        with torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False):
            try:
                arguments = make(self.pattern, self.member, lambda n, value: drift if n.type == "number" else value)
                args, kwargs = taken(self.pattern, self.target, arguments.values)
                with watch(arguments):
                    return self.target.call(*args, **kwargs)
            except Unrecognized:
                raise
            except Exception as error:  # whatever its shape function raises
                if self.target.tags & UNKNOWN:
                    raise Unrecognized("its outputs' sizes depend on its inputs' values") from None
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
                raise Unrecognized(f"torch cannot tell its outputs' sizes: {reason}") from None


def make(pattern: Pattern, member: Member, number: Callable[[Number, Any], Any]) -> Arguments:
    """The arguments of `member`, contiguous on the devices' kinds that it had; `number` gives those of Number."""
    found = Arguments({}, {})
    maker = _Maker(iter(member.sizes), iter(member.numbers), number, found.tensors)
    for parameter in pattern.parameters:
        found.values[parameter.name] = maker.value(parameter.node, parameter)
    return found


def taken(pattern: Pattern, target: Operator, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """`values` as `target` takes them: a functional variant takes no `out`."""
    known = {argument.name for argument in target.arguments}
    own = [p for p in pattern.parameters if not known or p.name in known]
    return [values[p.name] for p in own if not p.keyword], {p.name: values[p.name] for p in own if p.keyword}


@dataclass
class _Maker:
    sizes: Iterator[int]
    numbers: Iterator[Any]
    number: Callable[[Number, Any], Any]
    tensors: dict[Path, torch.Tensor]

    def value(self, node: Any, parameter: Parameter) -> Any:
        match node:
            case Tensor(dtype=dtype, rank=rank, device=device, path=path):
                shape = [next(self.sizes) for _ in range(rank)]
                made = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu" if device == "cpu" else "cuda")
                self.tensors[path] = made
                return made
            case Number():
                return self.number(node, next(self.numbers))
            case Baked(value=value):
                return constant(value, parameter.name)
        return [self.value(item, parameter) for item in node]


def constant(value: Any, name: str) -> Any:
    """The torch object that a baked value stands for; a trace file writes a device as a string, too."""
    if isinstance(value, TorchConstant):
        if value.kind == "dtype":
            return torch_dtype(value.name)
        if value.kind == "device":
            return device(value.name)
        if value.name not in WORDS:
            raise Unrecognized(f"torch has no {value.kind} {value.name[:40]}")
        return WORDS[value.name]
    if isinstance(value, str) and name == "device":
        return device(value)
    return float("nan") if value == "nan" else value


def device(name: str) -> torch.device:
    return torch.device("cpu" if name.split(":")[0] == "cpu" else "cuda")

"""A pattern's operator on tensors without data (torch's FakeTensorMode): what it returns, and of which sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kcap.schemas.families.generic_operator import Operator
from kcap.schemas.families.generic_pattern import Baked, Member, Number, Path, Pattern, Tensor
from kcap.schemas.families.generic_program import Untraceable
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


Watch = Callable[[Arguments], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fake:
    """A member's invocation of `target`, which is the pattern's operator or its functional variant.

    The tensors are on the devices that they had (what some operators return depends on it), else on none; with
    `device` "meta", which is ten times as fast, on none.
    """

    pattern: Pattern
    member: Member
    target: Operator
    device: str = ""

    def run(self, watch: Watch = lambda _: nullcontext(), drift: float = 1) -> Any:
        """What `target` returns, `watch` around it; Unrecognized if torch cannot tell without data."""
        if self.device == "meta":
            return self._run(nullcontext(), "meta", watch, drift)
        try:
            return self._run(_fake(), "", watch, drift)
        except Unrecognized as error:
            if self.target.tags & UNKNOWN or isinstance(error, Untraceable):
                raise
            return self._run(nullcontext(), "meta", watch, drift)

    def _run(self, mode: AbstractContextManager[Any], device: str, watch: Watch, drift: float) -> Any:
        assert self.target.call is not None
        with torch.no_grad(), mode:
            try:
                arguments = make(self.pattern, self.member, _number(drift), device)
                args, kwargs = taken(self.pattern, self.target, arguments.values)
                with watch(arguments):
                    return self.target.call(*args, **kwargs)
            except Unrecognized:
                raise
            except Exception as error:  # whatever its shape function raises
                raise Unrecognized(_reason(self.target, error)) from None


def _number(drift: float) -> Callable[[Number, Any], Any]:
    return lambda number, value: drift if number.type == "number" else value


def _reason(target: Operator, error: Exception) -> str:
    if target.tags & UNKNOWN:
        return "its outputs' sizes depend on its inputs' values"
    told = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
    return f"torch cannot tell its outputs' sizes: {told}"


@cache
def _fake() -> FakeTensorMode:
    return FakeTensorMode(allow_fallback_kernels=False)


def make(pattern: Pattern, member: Member, number: Callable[[Number, Any], Any], device: str = "meta") -> Arguments:
    """The arguments of `member`, contiguous, on `device` ("": where they were); `number` gives those of Number."""
    found = Arguments({}, {})
    maker = _Maker(iter(member.sizes), iter(member.numbers), number, found.tensors, device)
    for parameter in pattern.parameters:
        found.values[parameter.name] = maker.value(parameter.node, parameter.name)
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
    device: str

    def value(self, node: Any, name: str) -> Any:
        match node:
            case Tensor(dtype=dtype, rank=rank, device=device, path=path):
                shape = [next(self.sizes) for _ in range(rank)]
                made = torch.empty(shape, dtype=torch_dtype(dtype), device=self.device or kind(device))
                self.tensors[path] = made
                return made
            case Number():
                return self.number(node, next(self.numbers))
            case Baked(value=value):
                return constant(value, name, self.device)
        return [self.value(item, name) for item in node]


def constant(value: Any, name: str, device: str) -> Any:
    """The torch object that a baked value stands for, a device moved to `device`; a trace file has it as a string."""
    match value:
        case TorchConstant(kind="dtype", name=word):
            return torch_dtype(word)
        case TorchConstant(kind="device", name=word):
            return torch.device(device or kind(word))
        case TorchConstant(name=word) if word in WORDS:
            return WORDS[word]
        case TorchConstant():
            raise Unrecognized(f"torch has no {value.kind} {value.name[:40]}")
        case str() if name == "device":
            return torch.device(device or kind(value))
        case "nan":
            return float("nan")
    return value


def kind(device: str) -> str:
    """Of a device: torch tells what an operator returns on CPUs and on CUDA's; others are taken for the latter."""
    return "cpu" if device.split(":")[0] == "cpu" else "cuda"

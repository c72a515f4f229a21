"""A pattern's operator run on tensors without data: what it returns, and as which ATen operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kcap.errors import first_line
from kcap.schemas.derive.generic.pattern import Baked, Member, Number, Operator, Path, Pattern, Tensor
from kcap.schemas.derive.invocation import Unrecognized, torch_dtype
from kcap.schemas.recording.values import TorchConstant

LONGEST = 64  # lines; a longer decomposition explains nothing
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class Untraceable(Unrecognized):
    """The operator is no sequence of ATen operators on its inputs."""


@dataclass(frozen=True)
class Name:
    """A value that is written by its name."""

    text: str


@dataclass
class Line:
    targets: list[str]
    uses: set[str]
    text: str


@dataclass
class ReferenceBody:
    """Lines of Python over named values. `names`: of tensors by id; `alive` keeps them, so that no id is used twice."""

    device: str
    names: dict[int, str]
    lines: list[Line] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def write(self, value: Any) -> str:
        """`value` in Python; Untraceable for a tensor that no line computes."""
        match value:
            case Name(text=text):
                return text
            case torch.Tensor():
                if id(value) not in self.names:
                    raise Untraceable
                self.used.add(self.names[id(value)])
                return self.names[id(value)]
            case list() | tuple():
                return f"[{', '.join(map(self.write, value))}]"
            case torch.device():
                return self.device
            case float() if value != value or value in (float("inf"), float("-inf")):
                return f'float("{value}")'
            case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
        raise Untraceable

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
        """A call of the operator `aten.add.Tensor`, with an operator of Python where it has one."""
        texts = [self.write(arg) for arg in args]
        namespace, base, _ = name.split(".")
        if namespace == "aten" and base in INFIX and len(texts) == 2 and not kwargs:
            return f"{texts[0]} {INFIX[base]} {texts[1]}"
        if (dtype := _cast(name, args, kwargs)) is not None:
            return f"{texts[0]}.to({dtype})"
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}  # of the host's, where it was
        texts += [f"{key}={self.write(value)}" for key, value in kwargs.items()]
        return f"torch.ops.{name}({', '.join(texts)})"

    def add(self, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Add the line that computes `result`, one tensor or several."""
        self.used = set()
        text = self.call(name, args, kwargs)
        if id(result) in self.names:  # a conversion that had nothing to convert
            return
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if not results or not all(isinstance(item, torch.Tensor) for item in results) or len(self.lines) == LONGEST:
            raise Untraceable
        targets = [self.names.setdefault(id(item), f"v{len(self.names)}") for item in results]
        self.alive += results
        end = "" if results[0] is result else ","
        self.lines.append(Line(targets, self.used, f"{', '.join(targets)}{end} = {text}"))

    def needed_by(self, returned: list[str]) -> list[str]:
        """The lines that `returned` needs."""
        needed, lines = set(returned), []
        for line in reversed(self.lines):
            if needed & set(line.targets):
                needed |= line.uses
                lines.append(line.text)
        return lines[::-1]


def _cast(name: str, args: list[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a call that only converts to it."""
    if name == "aten._to_copy.default" and len(args) == 1 and list(kwargs) == ["dtype"]:
        return kwargs["dtype"]  # type: ignore[no-any-return]
    if name in ("aten.to.dtype", "prims.convert_element_type.default") and len(args) == 2 and not kwargs:
        return args[1]  # type: ignore[no-any-return]
    return None


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return core_aten_decompositions()  # type: ignore[no-any-return]


class Tracer(TorchDispatchMode):
    """Writes what runs below it into `body_lines`, decomposed into core ATen operators."""

    def __init__(self, body_lines: ReferenceBody) -> None:
        super().__init__()
        self.body_lines = body_lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.core not in func.tags and func in _decompositions():
            with self:
                result = _decompositions()[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = str(func)
        if func._schema.is_mutable or not (name.startswith("aten.") or _cast(name, list(args), kwargs)):
            raise Untraceable
        result = func(*args, **kwargs)
        self.body_lines.add(name, list(args), kwargs, result)
        return result


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
class FakeRun:
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
            return self._run(fake_mode(), "", watch, drift)
        except Unrecognized as error:
            if self.target.tags & UNKNOWN or isinstance(error, Untraceable):
                raise
            return self._run(nullcontext(), "meta", watch, drift)

    def _run(self, mode: AbstractContextManager[Any], device: str, watch: Watch, drift: float) -> Any:
        assert self.target.call is not None
        with torch.no_grad(), mode, _without_tracebacks():
            try:
                arguments = make_arguments(self.pattern, self.member, _number(drift), device)
                args, kwargs = arguments_taken(self.pattern, self.target, arguments.values)
                with watch(arguments):
                    return self.target.call(*args, **kwargs)
            except Unrecognized:
                raise
            except Exception as error:  # whatever its shape function raises
                raise Unrecognized(_reason(self.target, error)) from None


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """torch's fake tensors log the traceback of each error that they raise, which here is a reason."""
    log, quiet = logging.getLogger("torch._subclasses.fake_tensor"), lambda record: False
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def _number(drift: float) -> Callable[[Number, Any], Any]:
    return lambda number, value: drift if number.type == "number" else value


def _reason(target: Operator, error: Exception) -> str:
    if target.tags & UNKNOWN:
        return "its outputs' sizes depend on its inputs' values"
    return f"torch cannot tell its outputs' sizes: {first_line(error, 160)}"


@cache
def fake_mode() -> FakeTensorMode:
    """The first takes torch seconds, to import its compiler."""
    return FakeTensorMode(allow_fallback_kernels=False)


def make_arguments(
    pattern: Pattern, member: Member, number: Callable[[Number, Any], Any], device: str = "meta"
) -> Arguments:
    """The arguments of `member`, contiguous, on `device` ("": where they were); `number` gives those of Number."""
    arguments = Arguments({}, {})
    maker = _Maker(iter(member.sizes), iter(member.numbers), number, arguments.tensors, device)
    for parameter in pattern.parameters:
        arguments.values[parameter.name] = maker.value(parameter.node, parameter.name)
    return arguments


def arguments_taken(pattern: Pattern, target: Operator, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """`values` as `target` takes them: a functional variant takes no `out`."""
    accepted = {argument.name for argument in target.arguments}
    taken = [p for p in pattern.parameters if not accepted or p.name in accepted]
    return [values[p.name] for p in taken if not p.keyword], {p.name: values[p.name] for p in taken if p.keyword}


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
                tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=self.device or device_kind(device))
                self.tensors[path] = tensor
                return tensor
            case Number():
                return self.number(node, next(self.numbers))
            case Baked(value=value):
                return torch_constant(value, name, self.device)
        return [self.value(item, name) for item in node]


def torch_constant(value: Any, name: str, device: str) -> Any:
    """The torch object that a baked value names, on `device` if it is one; a trace file has it as a string."""
    match value:
        case TorchConstant(kind="dtype", name=word):
            return torch_dtype(word)
        case TorchConstant(kind="device", name=word):
            return torch.device(device or device_kind(word))
        case TorchConstant(name=word) if word in WORDS:
            return WORDS[word]
        case TorchConstant():
            raise Unrecognized(f"torch has no {value.kind} {value.name[:40]}")
        case str() if name == "device":
            return torch.device(device or device_kind(value))
        case "nan":
            return float("nan")
    return value


def device_kind(device: str) -> str:
    """`cpu` or `cuda`: torch knows what an operator returns on these; any other device is taken for `cuda`."""
    return "cpu" if device.split(":")[0] == "cpu" else "cuda"

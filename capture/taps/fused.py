"""An engine's own fused operators: each run as a handful of PyTorch's is a region, so that those have a name.

The arguments of its region are those of the call, then what the operator itself holds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

from kcap.capture.hooks.binding import Binder, binder
from kcap.capture.hooks.patching import MARK


class Numbering(Protocol):
    """The recorder's numbers of operators, by their names and arguments."""

    def operator(self, name: str, arguments: Sequence[str], work: bool = True, region: bool = False) -> int: ...


@dataclass(frozen=True)
class Arguments:
    """Of one operator's calls: how the region is called, and where its arguments come from."""

    name: str
    binder: Binder
    state: State | None
    _numbers: dict[tuple[str, ...], int] = field(default_factory=dict)  # by the names of a call's arguments

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], module: Any = None) -> Arguments:
        """`module`: the torch module that runs `function`, whose state are arguments too."""
        names = binder(function)
        state = None if module is None else State.of(module, names)
        return cls(name, names, state if state and state.names else None)

    def call(
        self, numbering: Numbering, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, Sequence[Any]]:
        """The number of the region's operator, and the values of its arguments."""
        names, values = self.binder(args, kwargs)
        if names not in self._numbers:
            own = self.state.names if self.state else ()
            self._numbers[names] = numbering.operator(self.name, names + own, region=True)
        state = self.state.values(operator) if self.state else ()
        return self._numbers[names], (*values, *state)


PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class State:
    """The names of what a torch module holds: parameters, buffers, and attributes that are tensors or plain values."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def of(cls, module: Any, binder: Binder) -> State:
        own = vars(module)
        arguments = {"training", *(name for name, _ in binder.defaults)}
        plain = [name for name, value in own.items() if name[0] != "_" and _is_plain(value)]
        groups = (own["_parameters"], own["_buffers"], plain)
        return cls(*(tuple(name for name in names if name not in arguments) for names in groups))

    @property
    def names(self) -> tuple[str, ...]:
        return self.parameters + self.buffers + self.plain

    def values(self, module: Any) -> tuple[Any, ...]:
        """As they are now: a weight may have been loaded anew."""
        own = module.__dict__
        parameters, buffers = own["_parameters"], own["_buffers"]
        return (*map(parameters.get, self.parameters), *map(buffers.get, self.buffers), *map(own.get, self.plain))


def _is_plain(value: Any) -> bool:
    import torch

    if isinstance(value, list | tuple):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, (*PLAIN, torch.Tensor, torch.dtype))


NAME = "fused_operators"


Function = Callable[..., Any]


class Listener(Numbering, Protocol):
    """The recorder, as kcap.capture.taps.external.Externals passes calls on to it."""

    @property
    def listening(self) -> bool: ...
    def enter_region(self, operator: int, values: Sequence[Any]) -> bool: ...
    def leave_region(self) -> None: ...
    def failed(self, tap: str, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Fused:
    """A function that an object of an engine has as `attribute`, its own or its class's: each call is a region `name`.

    `stateful`: the object is a torch module, whose parameters, buffers and plain attributes are arguments too, after
    the function's.
    """

    operator: Any
    attribute: str
    name: str
    stateful: bool = False


class FusedOperators:
    """The tap: `record` replaces the functions, `uninstall` puts them back."""

    name = NAME

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._replaced: list[_Replaced] = []
        self._absent = "no engine named its own"
        self._on = True

    def record(self, functions: Iterable[Fused], absent: str) -> None:
        """Record these from now on; `absent` says why there may be none."""
        self._absent = absent
        try:
            for fused in functions:
                self._replace(fused)
        except Exception as error:
            self.fail(error)

    def _replace(self, fused: Fused) -> None:
        original = getattr(fused.operator, fused.attribute)
        if hasattr(original, MARK):
            return
        replaced = _Replaced.of(fused.operator, fused.attribute)
        arguments = Arguments.of(fused.name, original, fused.operator if fused.stateful else None)
        wrapper = self._wrap(replaced.unbound(), arguments)
        setattr(fused.operator, fused.attribute, MethodType(wrapper, fused.operator))
        self._replaced.append(replaced)

    def install(self) -> None:
        """Nothing: the engine is not there yet."""

    def refresh(self) -> None:
        """Nothing: the adapter says when."""

    def uninstall(self) -> None:
        self._on = False
        for replaced in self._replaced:
            replaced.undo()
        self._replaced.clear()

    def health(self) -> tuple[str, str]:
        if not self._on:
            return "failed", ""
        return ("ok", f"{len(self._replaced)} functions") if self._replaced else ("absent", self._absent)

    def _wrap(self, original: Function, arguments: Arguments) -> Function:
        from torch.compiler import is_dynamo_compiling

        listener = self._listener

        @functools.wraps(original)
        def wrapper(operator: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not listener.listening or not self._enter(arguments, operator, args, kwargs):
                return original(operator, *args, **kwargs)
            try:
                return original(operator, *args, **kwargs)
            finally:
                self._leave()

        setattr(wrapper, MARK, NAME)
        return wrapper

    def _enter(self, arguments: Arguments, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if not self._on:
            return False
        try:
            number, values = arguments.call(self._listener, operator, args, kwargs)
            return self._listener.enter_region(number, values)
        except Exception as error:
            self.fail(error)
            return False

    def _leave(self) -> None:
        try:
            self._listener.leave_region()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Switch the tap off, and say so once."""
        if self._on:
            self._on = False
            self._listener.failed(NAME, error)


@dataclass(frozen=True)
class _Replaced:
    """A function that was replaced in an object, which it does not keep alive."""

    operator: weakref.ref[Any]
    attribute: str
    function: Function  # as a class has it, if it was bound to the object
    bound: bool
    own: bool  # an attribute of the object, not of its class

    @classmethod
    def of(cls, operator: Any, attribute: str) -> _Replaced:
        current = getattr(operator, attribute)
        bound = isinstance(current, MethodType) and current.__self__ is operator
        function = current.__func__ if bound else current
        return cls(weakref.ref(operator), attribute, function, bound, attribute in vars(operator))

    def unbound(self) -> Function:
        """The function, called with the object first: a copy of the object runs it on itself."""
        if self.bound:
            return self.function
        function = self.function
        return functools.wraps(function)(lambda operator, *args, **kwargs: function(*args, **kwargs))

    def undo(self) -> None:
        """Put it back, except where something else stands now."""
        operator = self.operator()
        if operator is None or not hasattr(vars(operator).get(self.attribute), MARK):
            return
        if not self.own:
            delattr(operator, self.attribute)
        else:
            setattr(operator, self.attribute, MethodType(self.function, operator) if self.bound else self.function)

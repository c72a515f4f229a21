"""An engine's own fused operators: each run as a handful of PyTorch's is a region, so that those have a name.

The engine's adapter says which functions of which objects run so. Those alone are replaced, in the objects that have
them: an operator that is one kernel of a library costs nothing, and what the engine compiles stays as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

from kcap.capture.taps.fused_arguments import Arguments, Numbering
from kcap.capture.taps.patching import MARK

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
        found = getattr(operator, attribute)
        bound = isinstance(found, MethodType) and found.__self__ is operator
        function = found.__func__ if bound else found
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

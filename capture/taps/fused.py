"""An engine's own fused operators: each invocation is a region, so that the handful of kernels in it has a name.

The engine's adapter says through which methods of which classes they run; what it leaves compiled stays as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Protocol

from kcap.capture.taps.binding import Binder, Pairs, binder
from kcap.capture.taps.patching import MARK, Patches, namespace

NAME = "fused_operators"
Function = Callable[..., Any]


class Listener(Protocol):
    """The recorder, as kcap.capture.taps.external.Externals passes calls on to it."""

    @property
    def listening(self) -> bool: ...
    def operator(self, name: str, arguments: Sequence[str], work: bool = True, region: bool = False) -> int: ...
    def enter_region(self, operator: int, values: Sequence[Any]) -> bool: ...
    def leave_region(self) -> None: ...
    def failed(self, tap: str, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Fused:
    """A class of an engine whose objects are its fused operators; `method` runs one.

    `name`: what the Recording calls an object's region, None where it is to have none. `function`: what the object
    runs; the region's arguments are called as its parameters. `stateful`: it is a torch module, whose parameters,
    buffers and plain attributes are arguments too, after those.
    """

    owner: type
    method: str
    name: Callable[[Any], str | None]
    function: Callable[[Any], Function]
    stateful: bool = False


class FusedOperators:
    """The tap: `record` replaces the methods, `uninstall` puts them back."""

    name = NAME

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._patches = Patches()
        self._known: dict[int, _Known] = {}  # by the object's id, as long as it lives
        self._absent = "no engine named its own"
        self._on = True

    def record(self, classes: Iterable[Fused], absent: str) -> None:
        """Record these from now on; `absent` says why there may be none."""
        self._absent = absent
        try:
            for fused in classes:
                for owner in _having(fused.owner, fused.method):
                    self._replace(owner, fused)
        except Exception as error:
            self.fail(error)

    def _replace(self, owner: type, fused: Fused) -> None:
        original: Function = namespace(owner)[fused.method]
        if owner is not fused.owner:  # which runs something of its own
            fused = replace(fused, function=lambda operator: MethodType(original, operator))
        self._patches.replace(owner, fused.method, self._wrap(original, fused))

    def install(self) -> None:
        """Nothing: the engine is not there yet."""

    def refresh(self) -> None:
        """Nothing: the adapter says when."""

    def uninstall(self) -> None:
        self._on = False
        self._patches.undo()
        self._known.clear()

    def health(self) -> tuple[str, str]:
        if not self._on:
            return "failed", ""
        return ("ok", f"{len(self._patches)} methods") if len(self._patches) else ("absent", self._absent)

    def _wrap(self, original: Function, fused: Fused) -> Function:
        from torch.compiler import is_dynamo_compiling

        listener = self._listener

        @functools.wraps(original)
        def wrapper(operator: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not listener.listening or not self._enter(fused, operator, args, kwargs):
                return original(operator, *args, **kwargs)
            try:
                return original(operator, *args, **kwargs)
            finally:
                self._leave()

        setattr(wrapper, MARK, NAME)
        return wrapper

    def _enter(self, fused: Fused, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            known = self._known.get(id(operator))
            if known is None or known.alive() is not operator:
                known = self._known[id(operator)] = _known(fused, operator)
            if not (self._on and known.name):
                return False
            number, values = known.call(self._listener, operator, args, kwargs)
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
class _Known:
    """What is known of one object: its region's name ("": it has none), and where its arguments come from."""

    alive: weakref.ref[Any]
    name: str
    binder: Binder
    state: _State | None
    _numbers: dict[int, tuple[int, tuple[Any, ...]]] = field(default_factory=dict)  # by the number of arguments given

    def call(
        self, listener: Listener, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, Sequence[Any]]:
        """The number of the region's operator, and the values of its arguments."""
        state = self.state.values(operator) if self.state else ()
        found = None if kwargs else self._numbers.get(len(args))
        if found is not None:
            number, defaults = found
            return number, (*args, *defaults, *state)
        pairs: Pairs = self.binder(args, kwargs)
        names = [*(name for name, _ in pairs), *(self.state.names if self.state else ())]
        number = listener.operator(self.name, names, region=True)
        values = [value for _, value in pairs]
        if not kwargs and len(args) <= len(self.binder.positional):
            self._numbers[len(args)] = number, tuple(values[len(args) :])
        return number, (*values, *state)


def _known(fused: Fused, operator: Any) -> _Known:
    name = fused.name(operator) or ""
    names = binder(fused.function(operator)) if name else Binder()
    state = _State.of(operator, names) if name and fused.stateful else None
    return _Known(weakref.ref(operator), name, names, state if state and state.names else None)


PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _State:
    """The names of what a torch module holds: parameters, buffers, and attributes that are tensors or plain values."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def of(cls, module: Any, given: Binder) -> _State:
        own = vars(module)
        known = {"training", *(name for name, _ in given.defaults)}
        plain = [name for name, value in own.items() if name[0] != "_" and _is_plain(value)]
        groups = (own["_parameters"], own["_buffers"], plain)
        return cls(*(tuple(name for name in names if name not in known) for names in groups))

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


def _having(owner: type, method: str) -> Iterator[type]:
    """`owner`, and each class below it that has a method of this name of its own."""
    if method in namespace(owner):
        yield owner
    kind: type
    for kind in owner.__subclasses__():
        yield from _having(kind, method)

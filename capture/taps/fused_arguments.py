"""The arguments of a fused operator's region: those of the call, then what the operator itself holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kcap.capture.taps.binding import Binder, Pairs, binder


class Numbering(Protocol):
    """The recorder's numbers of operators, by their names and arguments."""

    def operator(self, name: str, arguments: Sequence[str], work: bool = True, region: bool = False) -> int: ...


@dataclass(frozen=True)
class Arguments:
    """Of one operator's calls: how the region is called, and where its arguments come from."""

    name: str
    binder: Binder
    state: State | None
    _numbers: dict[int, tuple[int, tuple[Any, ...]]] = field(default_factory=dict)  # by the number of arguments given

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
        state = self.state.values(operator) if self.state else ()
        found = None if kwargs else self._numbers.get(len(args))
        if found is not None:
            number, defaults = found
            return number, (*args, *defaults, *state)
        pairs: Pairs = self.binder(args, kwargs)
        names = [*(name for name, _ in pairs), *(self.state.names if self.state else ())]
        number = numbering.operator(self.name, names, region=True)
        values = [value for _, value in pairs]
        if not kwargs and len(args) <= len(self.binder.positional):
            self._numbers[len(args)] = number, tuple(values[len(args) :])
        return number, (*values, *state)


PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class State:
    """The names of what a torch module holds: parameters, buffers, and attributes that are tensors or plain values."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def of(cls, module: Any, given: Binder) -> State:
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

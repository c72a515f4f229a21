"""Calls of functions that are called from Python and never reach the dispatcher: a wrapper tells of each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from kcap.capture.taps.binding import Pairs, binder
from kcap.capture.taps.patching import MARK

Function = Callable[..., Any]
LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)  # they run when awaited
Describe = Callable[[Sequence[Any], Mapping[str, Any]], Pairs]


class Listener(Protocol):
    """What a tap tells of each call."""

    @property
    def listening(self) -> bool:
        """Whether calls are recorded now."""

    def enter(
        self, operator: str, arguments: Sequence[tuple[str, Any]], work: bool = True, detail: bool = False
    ) -> bool:
        """A call begins on this thread; False: it is not recorded, and no `leave` follows.

        `work` is False for host work, such as a plan; `detail` keeps a call out that happens inside another library's.
        """

    def leave(self) -> None:
        """The call that began last on this thread has ended."""

    def failed(self, tap: str, error: BaseException) -> None:
        """The tap failed, not the library: to be noted in the Recording. The tap is off from now on."""


class Calls:
    """The way from one tap's wrappers to the listener; its first failure closes it for good."""

    def __init__(self, tap: str, listener: Listener) -> None:
        self.tap = tap
        self.listener = listener
        self.off = False

    def run(
        self,
        function: Function,
        operator: str,
        describe: Describe,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        work: bool = True,
        detail: bool = False,
    ) -> Any:
        """Call `function` and tell of it. Results and exceptions are its own, and it runs exactly once."""
        if not self._enter(operator, describe, args, kwargs, work, detail):
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._leave()

    def _enter(self, operator: str, describe: Describe, args: Any, kwargs: Any, work: bool, detail: bool) -> bool:
        try:
            if self.off or not any(map(_holds_tensor, (*args, *kwargs.values()))):
                return False  # a call that takes no tensor launches nothing
            return self.listener.enter(operator, describe(args, kwargs), work=work, detail=detail)
        except Exception as error:
            self.fail(error)
            return False

    def _leave(self) -> None:
        try:
            self.listener.leave()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Switch the tap off, and say so once."""
        if not self.off:
            self.off = True
            self.listener.failed(self.tap, error)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__dlpack__")


def wrap(
    function: Function,
    operator: str,
    calls: Calls,
    describe: Describe | None = None,
    work: bool = True,
    detail: bool = False,
) -> Function:
    """`function`, telling `calls` of each of its calls; generators, coroutines and wrappers stay as they are."""
    if hasattr(function, MARK) or any(kind(function) for kind in LATER):
        return function
    listener, names = calls.listener, describe or binder(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not listener.listening:  # in this order a compiler guards on nothing of kcap's
            return function(*args, **kwargs)
        return calls.run(function, operator, names, args, kwargs, work, detail)

    setattr(wrapper, MARK, calls.tap)
    return wrapper

"""A library's functions that never reach the dispatcher: wrapped wherever a module or a class holds them."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from kcap.capture.hooks.binding import Named, binder
from kcap.capture.hooks.imports import when_imported
from kcap.capture.hooks.patching import MARK, Patches, namespace
from kcap.errors import KcapError

Function = Callable[..., Any]


LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)  # they run when awaited


Describe = Callable[[Sequence[Any], Mapping[str, Any]], Named]
NumberLaunch = Callable[[], int]  # the number of a call's launch, asked for when a call is recorded
Divert = Callable[[str, Mapping[str, Any], Callable[[], Any]], Any]  # operator, arguments by name, the function itself


class Listener(Protocol):
    """What a tap reports each call to."""

    @property
    def listening(self) -> bool:
        """Whether calls are recorded now."""

    def may_record(self, detail: bool) -> bool:
        """Whether `enter` may record what is called on this thread now: asked once, before the call is described."""

    def enter(
        self,
        operator: str,
        arguments: Named,
        work: bool = True,
        detail: bool = False,
        launch: int = -1,
    ) -> bool:
        """A call begins on this thread; False: it is not recorded, and no `leave` follows.

        `work` is False for host work, such as a plan; `detail` keeps a call out that happens inside another library's;
        `launch` is the number of its launch, if it has one.
        """

    def leave(self) -> None:
        """The call that began last on this thread has ended."""

    def launch(self, fields: dict[str, Any]) -> int | None:
        """The number of a launch of these fields; None: there are too many."""

    def library(self, content: bytes) -> str:
        """Keep a compiled library; what the launches of its functions call it."""

    def group(self, size: int, rank: int) -> str:
        """What to report for a process group of which a call tells but its size and this process's rank in it."""

    def failed(self, tap: str, error: BaseException) -> None:
        """The tap failed, not the library: to be noted in the Recording. The tap is off from now on."""


class Calls:
    """The way from one tap's wrappers to the listener; its first failure closes it for good.

    `divert` is asked to answer each call, where there is one.
    """

    def __init__(self, tap: str, listener: Listener) -> None:
        self.tap = tap
        self.listener = listener
        self.off = False
        self.divert: Divert | None = None

    def run(
        self,
        function: Function,
        operator: str,
        describe: Describe,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        work: bool = True,
        detail: bool = False,
        launch: NumberLaunch | None = None,
    ) -> Any:
        """Call `function`, or what stands in its place, and tell of it. Results and exceptions are its own, and it runs
        exactly once."""
        if self.divert is None:
            return self._run(function, operator, describe, args, kwargs, work, detail, launch)
        own = functools.partial(function, *args, **kwargs)
        if self.listener.listening:
            own = functools.partial(self._run, function, operator, describe, args, kwargs, work, detail, launch)
        return self.divert(operator, dict(zip(*describe(args, kwargs), strict=True)), own)

    def _run(
        self,
        function: Function,
        operator: str,
        describe: Describe,
        args: Any,
        kwargs: Any,
        work: bool,
        detail: bool,
        launch: NumberLaunch | None,
    ) -> Any:
        entered = False
        try:  # a call that takes no tensor launches nothing
            if not self.off and _take_tensors(args, kwargs) and self.listener.may_record(detail):
                number = -1 if launch is None else launch()
                entered = self.listener.enter(operator, describe(args, kwargs), work, detail, number)
        except Exception as error:
            self.fail(error)
        if not entered:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._leave()

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


def _take_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(map(_holds_tensor, args)) or any(map(_holds_tensor, kwargs.values()))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return any(map(_holds_tensor, value)) if isinstance(value, list | tuple) else hasattr(type(value), "__dlpack__")


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
        # In this order a compiler guards on nothing of kcap's.
        if is_dynamo_compiling() or not (listener.listening or calls.divert):
            return function(*args, **kwargs)
        return calls.run(function, operator, names, args, kwargs, work, detail)

    setattr(wrapper, MARK, calls.tap)
    return wrapper


Finder = Callable[[ModuleType, Calls], Iterable[tuple[Any, str, Function]]]


class LibraryTap:
    """Records the functions that `find` yields of each module of a package: its holder, its name there, a wrapper.

    It waits for the package to be imported; modules imported later are found by `refresh`. `modules`: the packages are
    modules, and what `find` yields is in their classes, so that no other module need be looked at.
    """

    def __init__(
        self, name: str, packages: Sequence[str], listener: Listener, find: Finder, modules: bool = False
    ) -> None:
        self.calls = Calls(name, listener)
        self._find = find
        self._alone = packages if modules else ()
        self._inside = tuple(f"{package}." for package in packages)
        self._patches = Patches()
        self._sizes: dict[str, int] = {}
        self._found = 0
        self._lock = threading.RLock()
        self._waits = [when_imported(name, self._imported) for name in packages if not _initializing(name)]

    def __len__(self) -> int:
        """How many functions it records."""
        return len(self._patches)

    def _imported(self, package: ModuleType) -> None:
        self.refresh()
        if not self._found:
            self.calls.fail(KcapError(f"no function to record in {package.__name__}"))

    def refresh(self) -> None:
        """Record what was imported since; cheap when nothing was."""
        try:
            with self._lock:
                if not self.calls.off:
                    self._refresh()
        except Exception as error:
            self.calls.fail(error)

    def _refresh(self) -> None:
        names = self._alone or list(sys.modules)
        known = [(name, module) for name in names if (module := sys.modules.get(name)) is not None]
        grown = {name: module for name, module in known if self._has_grown(name, module)}
        own = [module for name, module in grown.items() if f"{name}.".startswith(self._inside)]
        before = len(self)
        self._found += sum(self._replace_in(module) for module in own)
        modules = known if len(self) > before else list(grown.items())
        self._patches.rebind_all(module for _, module in modules if isinstance(module, ModuleType))

    def _replace_in(self, module: ModuleType) -> int:
        functions = list(self._find(module, self.calls))
        for holder, name, wrapper in functions:
            self._patches.replace(holder, name, wrapper)
        for holder in {holder for holder, _, _ in functions if isinstance(holder, type)}:
            self._patches.rebind(holder)
        return len(functions)

    def _has_grown(self, name: str, module: Any) -> bool:
        size = len(namespace(module)) if isinstance(module, ModuleType) else 0
        grown = self._sizes.get(name, 0) != size
        self._sizes[name] = size
        return grown

    def undo(self) -> None:
        """Give every function back."""
        self.calls.off = True
        self._patches.undo()
        for undo in self._waits:
            undo()


def _initializing(package: str) -> bool:
    """Whether its import is under way, as where tvm-ffi imports torch: a later `refresh` finds what it brings."""
    return bool(getattr(getattr(sys.modules.get(package), "__spec__", None), "_initializing", False))

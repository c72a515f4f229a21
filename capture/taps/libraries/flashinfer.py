"""FlashInfer: its public functions and the methods of its wrapper classes, each run together with its plan.

`flashinfer::rmsnorm`, `flashinfer::BatchDecodeWithPagedKVCacheWrapper.run`. FlashInfer marks its API with a decorator;
where that leaves no trace on the function, the source does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kcap.capture.hooks.binding import Binder, Named, binder, named
from kcap.capture.hooks.patching import MARK, namespace
from kcap.capture.taps.libraries.library import Calls, Function, LibraryTap, Listener, wrap

PACKAGE = "flashinfer"
DECORATOR = "@flashinfer_api"
MARKING = "flashinfer.api_logging"
PLANS = ("plan", "begin_forward")
HOST = (*PLANS, "end_forward", "reset_workspace_buffer")
WORKSPACE = "workspace"
METHODS = (*HOST, "run", "forward", "run_return_lse", "forward_return_lse")


def install(listener: Listener) -> LibraryTap:
    """Record FlashInfer's calls from its import on."""
    plans = Plans()
    return LibraryTap(PACKAGE, [PACKAGE], listener, lambda module, calls: find(module, calls, plans))


class Plans:
    """The arguments of each object's latest plan, until the next one or the object's end."""

    def __init__(self) -> None:
        self._latest: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._made_with: dict[type, tuple[str, ...]] = {}

    def keeping(self, function: Function, names: Binder, calls: Calls) -> Function:
        """`function`, a plan, whose arguments are kept: recording may begin between a plan and its runs."""

        @functools.wraps(function)
        def plan(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            try:
                latest[self] = {f"plan.{name}": value for name, value in names.of_method((self, *args), kwargs).items()}
            except Exception as error:
                calls.fail(error)
            return result

        latest = self._latest
        return plan

    def of(self, planned: Any) -> dict[str, Any]:
        """What the object's next run is reported with: its plan, and the plain values that it was made with."""
        return {**self._latest.get(planned, {}), **dict(self._facts(planned))}

    def _facts(self, wrapper: Any) -> Iterator[tuple[str, Any]]:
        kind = type(wrapper)
        if kind not in self._made_with:
            self._made_with[kind] = binder(kind).positional
        for name in self._made_with[kind]:
            value = vars(wrapper).get(f"_{name}", vars(wrapper).get(name))
            if isinstance(value, str | bool | int | float):
                yield f"init.{name}", value


def find(module: ModuleType, calls: Calls, plans: Plans) -> Iterator[tuple[Any, str, Function]]:
    """The API that the module defines: its functions, and the methods of its classes."""
    own = {name: value for name, value in namespace(module).items() if _is_of(value, module)}
    api = Marks(module) if MARKING in sys.modules else Exports()
    for name, value in own.items():
        if isinstance(value, type):
            yield from _methods(value, api, calls, plans)
        elif not name.startswith("_") and (api.has(value) or (_is_plan(name) and binder(value).takes_self)):
            yield module, name, _wrap(value, name, calls, plans)


def _is_of(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ == module.__name__


def _methods(kind: type, api: Marks | Exports, calls: Calls, plans: Plans) -> Iterator[tuple[Any, str, Function]]:
    functions = {
        name: value
        for name, value in namespace(kind).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
    marked = {name for name, value in functions.items() if api.has(value, kind)}
    for name, value in functions.items():
        if name in marked or (marked and name in PLANS):
            yield kind, name, _wrap(value, f"{kind.__name__}.{value.__name__}", calls, plans)


class Marks:
    """The API by FlashInfer's decorator: what it attached to a function, else the source above the function."""

    def __init__(self, module: ModuleType) -> None:
        path = Path(getattr(module, "__file__", None) or "")
        self._lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".py" else []

    def has(self, function: Any, owner: type | None = None) -> bool:
        """Whether the decorator was applied to it."""
        if hasattr(function, "fi_trace") or hasattr(function, MARK):
            return True
        code = getattr(inspect.unwrap(function), "__code__", None)
        above = self._lines[code.co_firstlineno - 1 :] if code else []
        return any(line.lstrip().startswith(DECORATOR) for line in itertools.takewhile(_is_above, above))


def _is_above(line: str) -> bool:
    return not line.lstrip().startswith(("def ", "async def "))


class Exports:
    """The API of a version without the decorator: what the package itself exports."""

    def __init__(self) -> None:
        self._exported = {id(value) for value in namespace(sys.modules[PACKAGE]).values()}

    def has(self, function: Any, owner: type | None = None) -> bool:
        """Whether it is exported, or a known method of an exported class."""
        return id(owner or function) in self._exported and (owner is None or function.__name__ in METHODS)


def _wrap(function: Function, name: str, calls: Calls, plans: Plans) -> Function:
    if hasattr(function, MARK):
        return function
    names, operator = binder(function), f"{PACKAGE}::{name}"

    def with_group(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        return _with_group(names.by_name(args, kwargs), calls)

    if not names.takes_self:
        return wrap(function, operator, calls, with_group if WORKSPACE in names.positional else names)

    def with_plan(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        return named({**names.of_method(args, kwargs), **plans.of(args[0])})

    def without_self(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        return named(names.of_method(args, kwargs))

    last = name.rpartition(".")[2]
    if _is_plan(last):
        return wrap(plans.keeping(function, names, calls), operator, calls, without_self, work=False)
    return wrap(function, operator, calls, with_plan, work=last not in HOST)


def _with_group(arguments: dict[str, Any], calls: Calls) -> Named:
    """With the process group whose ranks share the workspace, if it is one of a collective."""
    workspace = arguments[WORKSPACE]
    size, rank = getattr(workspace, "world_size", None), getattr(workspace, "rank", None)
    if not isinstance(size, int) or not isinstance(rank, int):
        return named(arguments)
    return named({**arguments, "group": calls.listener.group(size, rank)})


def _is_plan(name: str) -> bool:
    return name in PLANS or (name.endswith("_plan") and not name.startswith("_"))

"""NCCL as vLLM and SGLang bind it themselves, past torch.distributed: the methods of their PyNcclCommunicator.

`pynccl::all_gather`. Where an operator runs one collective and no kernel beside it but aten's (`vllm::all_reduce`), the
collective is its detail. Those between `group_start` and `group_end` are one call, as NCCL launches them together: its
arguments are lists, and it has their name, or is `pynccl::group` where they differ.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch.compiler import is_dynamo_compiling

from kcap.capture.hooks.binding import Named, binder, named
from kcap.capture.hooks.patching import MARK, namespace
from kcap.capture.recorder.recorder import c10d_group
from kcap.capture.taps.libraries.library import Calls, Function, LibraryTap, Listener, wrap

PACKAGE = "pynccl"
MODULES = tuple(f"{engine}.distributed.device_communicators.pynccl" for engine in ("vllm", "sglang.srt"))
COMMUNICATOR = "PyNcclCommunicator"
LEFT_OUT = ("_", "destroy", "register_", "deregister_", "batch_")  # a batch is a group of sends and receives


def install(listener: Listener) -> LibraryTap:
    """Record the collectives of the engine's communicators, once their module is imported."""
    group = Group()
    return LibraryTap(PACKAGE, MODULES, listener, lambda module, calls: find(module, calls, group), modules=True)


class Group(threading.local):
    """`waiting`: what this thread's group has so far, by the method's name; None outside of one. Groups may nest."""

    waiting: list[tuple[str, dict[str, Any]]] | None = None
    depth = 0


def find(module: ModuleType, calls: Calls, group: Group) -> Iterator[tuple[Any, str, Function]]:
    """The methods of the module's communicator."""
    communicator = namespace(module).get(COMMUNICATOR)
    if module.__name__ not in MODULES or communicator is None:
        return
    kinds = {"group_start": _start, "group_end": _end}
    for name, method in list(namespace(communicator).items()):
        if isinstance(method, FunctionType) and not name.startswith(LEFT_OUT) and not hasattr(method, MARK):
            wrapper = functools.wraps(method)(kinds.get(name, _collective)(method, calls, group))
            setattr(wrapper, MARK, calls.tap)
            yield communicator, name, wrapper


def _start(method: Function, calls: Calls, group: Group) -> Function:
    def group_start(self: Any) -> Any:
        if not is_dynamo_compiling():
            group.depth += 1
            if group.depth == 1:
                group.waiting = [] if calls.listener.listening and not calls.off else None
        return method(self)

    return group_start


def _end(method: Function, calls: Calls, group: Group) -> Function:
    def launch(self: Any, *_: Any) -> Any:
        return method(self)

    def group_end(self: Any) -> Any:
        if is_dynamo_compiling():
            return method(self)
        group.depth = max(0, group.depth - 1)
        waiting, group.waiting = (None, group.waiting) if group.depth else (group.waiting, None)
        if not waiting:
            return method(self)
        try:
            operator, arguments = joined(waiting)
            arguments["group"] = _given_group(self)
        except Exception as error:
            calls.fail(error)
            return method(self)
        return calls.run(launch, operator, lambda *_: named(arguments), [self, *arguments.values()], {}, detail=True)

    return group_end


def joined(collectives: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """One call for all of a group: its operator, and the lists of their arguments, unless it is but one."""
    (first, own), *others = collectives
    if not others:
        return f"{PACKAGE}::{first}", own
    alike = len({method for method, _ in collectives}) == 1
    lists = defaultdict[str, list[Any]](list)
    for method, arguments in collectives:
        for name, value in arguments.items():
            lists[name if alike else f"{method}.{name}"].append(value)
    return f"{PACKAGE}::{first if alike else 'group'}", dict(lists)


def _collective(method: Function, calls: Calls, group: Group) -> Function:
    name, names = method.__name__, binder(method)

    def own(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _plain(value) for name, value in names.of_method(args, kwargs).items() if name != "stream"}

    def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
        return named({**own(args, kwargs), "group": _given_group(args[0])})

    recorded = wrap(method, f"{PACKAGE}::{name}", calls, describe, detail=True)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or getattr(self, "disabled", False):
            return method(self, *args, **kwargs)
        if not group.depth:
            return recorded(self, *args, **kwargs)
        if group.waiting is None:
            return method(self, *args, **kwargs)
        try:
            group.waiting.append((name, own((self, *args), kwargs)))
        except Exception as error:
            calls.fail(error)
        return method(self, *args, **kwargs)

    return collective


def _plain(value: Any) -> Any:
    """A reduction by its name, as functional collectives have it: `sum`."""
    return value.name.lower() if type(value).__name__ == "RedOpType" else value


def _given_group(communicator: Any) -> Any:
    return c10d_group(getattr(communicator, "group", None))

"""NCCL as vLLM and SGLang bind it themselves, past torch.distributed: the methods of their PyNcclCommunicator.

`pynccl::all_gather`. Where an operator runs one collective and no other kernel (`vllm::all_reduce`), the collective is
its detail. Those between `group_start` and `group_end` are one call, as NCCL launches them together: its arguments are
lists, and it has their name, or is `pynccl::group` where they differ.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch.compiler import is_dynamo_compiling

from kcap.capture.hooks.binding import Pairs, binder
from kcap.capture.hooks.patching import MARK, namespace
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
    """`waiting`: what this thread's group has so far, by the method's name; None outside of one."""

    waiting: list[tuple[str, Pairs]] | None = None


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
        group.waiting = []
        return method(self)

    return group_start


def _end(method: Function, calls: Calls, group: Group) -> Function:
    def group_end(self: Any) -> Any:
        waiting, group.waiting = group.waiting, None
        if not waiting:
            return method(self)
        operator, pairs = joined(waiting)
        names, values = zip(*pairs, _name_of_group(self), strict=True)
        return calls.run(
            lambda *_: method(self), operator, lambda *_: list(zip(names, values, strict=True)), values, {}, detail=True
        )

    return group_end


def joined(collectives: Sequence[tuple[str, Pairs]]) -> tuple[str, Pairs]:
    """One call for all of a group: its operator, and the lists of their arguments."""
    alike = len({method for method, _ in collectives}) == 1
    lists = defaultdict[str, list[Any]](list)
    for method, pairs in collectives:
        for name, value in pairs:
            lists[name if alike else f"{method}.{name}"].append(value)
    return f"{PACKAGE}::{collectives[0][0] if alike else 'group'}", [*lists.items()]


def _collective(method: Function, calls: Calls, group: Group) -> Function:
    name, names = method.__name__, binder(method)

    def own(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pairs:
        return [(name, _plain(value)) for name, value in names(args, kwargs)[1:] if name != "stream"]

    def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pairs:
        return [*own(args, kwargs), _name_of_group(args[0])]

    recorded = wrap(method, f"{PACKAGE}::{name}", calls, describe, detail=True)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or getattr(self, "disabled", False):
            return method(self, *args, **kwargs)
        if group.waiting is None:
            return recorded(self, *args, **kwargs)
        try:
            group.waiting.append((name, own((self, *args), kwargs)))
        except Exception as error:
            calls.fail(error)
        return method(self, *args, **kwargs)

    return collective


def _plain(value: Any) -> Any:
    """A reduction by its name, as functional collectives have it: `sum`."""
    return value.name.lower() if type(value).__name__ == "RedOpType" else value


def _name_of_group(communicator: Any) -> tuple[str, Any]:
    """As the engine's groups are told to the recorder."""
    return "group", f"c10d/{getattr(communicator.group, 'group_name', '')}"

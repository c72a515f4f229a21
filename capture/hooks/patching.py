"""Puts wrappers in the place of functions, wherever a module or a class holds them, and of methods; takes them back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

from kcap.capture.hooks.imports import Hook, when_imported

PARTIALS = (functools.partial, functools.partialmethod)
_PARTIAL_IDS = frozenset(map(id, PARTIALS))


MARK = "__kcap__"  # an attribute of every wrapper


def namespace(holder: Any) -> dict[str, Any]:
    """A module's or a class's own names, without waking a module that is to be loaded lazily.

    Not all that says it is a module has a table of them: cffi's libraries do not.
    """
    try:
        names: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(holder, ModuleType) else dict(vars(holder))


class Patches:
    """The functions replaced so far. What is replaced already stays, so doing all of it again changes nothing."""

    def __init__(self) -> None:
        self._replaced: dict[int, tuple[Any, Any]] = {}  # by the original's id, which lives as long as the entry
        self._done: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._replaced)

    def replace(self, holder: Any, name: str, wrapper: Any) -> None:
        """Put `wrapper` where `holder` has the original under `name`."""
        original = namespace(holder)[name]
        if hasattr(original, MARK):
            return
        _, wrapper = self._replaced.setdefault(id(original), (original, wrapper))
        self._set(holder, name, original, wrapper)

    def rebind(self, holder: Any) -> None:
        """Replace every other name of `holder` that is one of the originals, or a partial of one."""
        names = dict(namespace(holder))
        if not self._may_be_among(names.values()):
            return
        for name, value in names.items():
            wrapper = self._wrapper_of(value)
            if wrapper is not None:
                self._set(holder, name, value, wrapper)

    def rebind_all(self, modules: Iterable[ModuleType]) -> None:
        """`rebind` each of them."""
        for module in modules:
            self.rebind(module)

    def undo(self) -> None:
        """Put every original back, except where something else stands now."""
        for holder, name, original, wrapper in reversed(self._done):
            if namespace(holder).get(name) is wrapper:
                setattr(holder, name, original)
        self._done.clear()
        self._replaced.clear()

    def _may_be_among(self, values: Collection[Any]) -> bool:
        """Whether an original or any partial is; told in C, as an engine's thousands of modules hardly have one."""
        if self._replaced.keys().isdisjoint(map(id, values)):
            return bool(self._replaced) and not _PARTIAL_IDS.isdisjoint(map(id, map(type, values)))
        return True

    def _wrapper_of(self, value: Any) -> Any:
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if type(value) not in PARTIALS or id(value.func) not in self._replaced:
            return None
        wrapper = type(value)(self._replaced[id(value.func)][1], *value.args, **value.keywords)
        return self._replaced.setdefault(id(value), (value, wrapper))[1]

    def _set(self, holder: Any, name: str, original: Any, wrapper: Any) -> None:
        setattr(holder, name, wrapper)
        self._done.append((holder, name, original, wrapper))


Around = Callable[..., Any]  # called with the original, bound, and the arguments


class Methods:
    """Methods replaced by functions around them. After `undo` a replacement that others kept calls the original."""

    def __init__(self) -> None:
        self.on = True
        self._undone: list[Callable[[], None]] = []

    def around(self, owner: Any, name: str, around: Around) -> None:
        """Have `owner.name(self, …)` call `around(original, self, …)`; AttributeError if there is no such method."""

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs) if self.on else original(*args, **kwargs)

            return replacement

        self.replace(owner, name, made)

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(original)` in the place of `owner.name`. Its arguments are passed on once less than by `around`,
        which counts where they are many; it has to see for itself whether this is `on`."""
        own, found = owner.__dict__.get(name), inspect.getattr_static(owner, name)
        kind = type(found) if isinstance(found, classmethod | staticmethod) else None
        original = found.__func__ if kind else found
        replacement = functools.wraps(original)(make(original))
        placed = kind(replacement) if kind else replacement
        setattr(owner, name, placed)

        def undo() -> None:
            if owner.__dict__.get(name) is placed:
                delattr(owner, name) if own is None else setattr(owner, name, own)

        self._undone.append(undo)

    def when_imported(self, name: str, hook: Hook) -> None:
        """Run `hook(module)` once the module is imported, unless `undo` comes before."""
        self._undone.append(when_imported(name, hook))

    def undo(self) -> None:
        self.on = False
        while self._undone:
            self._undone.pop()()

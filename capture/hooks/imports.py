"""Calls back when a module has been imported, so that hooking an engine imports nothing early."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """The module's own loader, but for what it does last."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for hook in _finder.hooks.pop(module.__name__, []):
            hook(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._searching = threading.local()  # the search below asks this finder again

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Also asked by who only looks whether the module is there: the hooks wait for its import."""
        if name not in self.hooks or getattr(self._searching, "name", None) == name:
            return None
        before, self._searching.name = getattr(self._searching, "name", None), name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.name = before
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


def when_imported(name: str, hook: Hook) -> Callable[[], None]:
    """Run `hook(module)` now if `name` is imported already, else right after it has been.

    Returns what takes it back: until then, what `hook` holds is held.
    """
    if name in sys.modules:
        hook(sys.modules[name])
        return lambda: None
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    waiting = _finder.hooks.setdefault(name, [])
    waiting.append(hook)

    def undo() -> None:
        if hook in waiting:
            waiting.remove(hook)
        if not waiting and _finder.hooks.get(name) is waiting:
            del _finder.hooks[name]

    return undo

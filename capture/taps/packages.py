"""The tap of a package: its functions are replaced by recorded ones, wherever a module or a class holds them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from kcap.capture.imports import when_imported
from kcap.capture.taps.library import Calls, Function, Listener
from kcap.capture.taps.patching import Patches, namespace
from kcap.errors import KcapError

Finder = Callable[[ModuleType, Calls], Iterable[tuple[Any, str, Function]]]


class LibraryTap:
    """Records the functions that `find` yields of each module of a package: its holder, its name there, a wrapper.

    It waits for the package to be imported; modules imported later are found by `refresh`.
    """

    def __init__(self, name: str, packages: Sequence[str], listener: Listener, find: Finder) -> None:
        self.calls = Calls(name, listener)
        self._find = find
        self._packages = packages
        self._patches = Patches()
        self._sizes: dict[str, int] = {}
        self._found = 0
        self._lock = threading.RLock()
        for package in packages:
            when_imported(package, self._imported)

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
        grown = {name: module for name, module in list(sys.modules.items()) if self._has_grown(name, module)}
        own = [module for name, module in grown.items() if self._is_own(name)]
        before = len(self)
        self._found += sum(self._replace_in(module) for module in own)
        modules = list(sys.modules.items()) if len(self) > before else list(grown.items())
        self._patches.rebind_all(module for _, module in modules if isinstance(module, ModuleType))

    def _replace_in(self, module: ModuleType) -> int:
        found = list(self._find(module, self.calls))
        for holder, name, wrapper in found:
            self._patches.replace(holder, name, wrapper)
        for holder in {holder for holder, _, _ in found if isinstance(holder, type)}:
            self._patches.rebind(holder)
        return len(found)

    def _is_own(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def _has_grown(self, name: str, module: Any) -> bool:
        size = len(namespace(module)) if isinstance(module, ModuleType) else 0
        grown = self._sizes.get(name, 0) != size
        self._sizes[name] = size
        return grown

    def undo(self) -> None:
        """Give every function back."""
        self.calls.off = True
        self._patches.undo()

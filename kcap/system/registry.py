"""Plug-ins: the files of a package, each of which registers what it holds under its own keys."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Registry(Generic[Key, Item]):
    """Items by key; a key is registered once. `noun` names an item in messages.

    >>> EXPORTERS: Registry[str, Exporter] = Registry("exporter")
    >>> EXPORTERS.add("parquet", Parquet())
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._items: dict[Key, Item] = {}

    def add(self, key: Key, item: Item) -> None:
        """ValueError where `key` is taken: two files would answer to one name, and the later one would win unseen."""
        if key in self._items:
            raise ValueError(f"{self.noun} {key!r} is registered twice: {self._items[key]!r} and {item!r}")
        self._items[key] = item

    def get(self, key: Key) -> Item | None:
        return self._items.get(key)

    def __getitem__(self, key: Key) -> Item:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)


def plugin_names(package: str) -> list[str]:
    """The files and folders of `package` (a dotted name) that are plug-ins: all but `common`, sorted."""
    path = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if module.name != "common")


@cache
def import_plugins(package: str) -> None:
    """Import every module below `package`, its folders' included, so that all have registered what they hold."""
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        importlib.import_module(module.name)

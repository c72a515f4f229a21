"""Values by the objects that they belong to."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """As `weakref.WeakKeyDictionary`, but by what a key is and not by what it equals, and several times as fast.

    A key must be weakly referenceable to be given a value, and None is no value.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> V | None:
        """The value of this very object."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: Any, value: V) -> None:
        number = id(key)

        def forget(reference: weakref.ref[Any]) -> None:
            if (entry := self._entries.get(number)) is not None and entry[0] is reference:
                del self._entries[number]

        self._entries[number] = (weakref.ref(key, forget), value)

    def pop(self, key: Any) -> V | None:
        """Forget the value of this object, if it has one."""
        value = self.get(key)
        if value is not None:
            self._entries.pop(id(key), None)
        return value

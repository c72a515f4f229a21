"""Replaces methods of other people's classes, and puts them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]  # called with the original, bound, and the arguments


class Methods:
    """Methods replaced by functions around them. After `undo` a replacement that others kept calls the original."""

    def __init__(self) -> None:
        self.on = True
        self._undone: list[Callable[[], None]] = []

    def around(self, owner: Any, name: str, around: Around) -> None:
        """Have `owner.name(self, …)` call `around(original, self, …)`; AttributeError if there is no such method."""
        original = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self.on else original(*args, **kwargs)

        inherited = name not in owner.__dict__
        setattr(owner, name, replacement)

        def undo() -> None:
            if owner.__dict__.get(name) is replacement:
                delattr(owner, name) if inherited else setattr(owner, name, original)

        self._undone.append(undo)

    def undo(self) -> None:
        self.on = False
        while self._undone:
            self._undone.pop()()

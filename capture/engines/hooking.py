"""What every adapter hooks an engine with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kcap.capture.imports import Hook
from kcap.capture.window import Window

Around = Callable[..., Any]  # called with the original, bound, then the object and the arguments


def contained(window: Window, hook_module: Hook) -> Hook:
    """An engine that kcap does not know is imported all the same; the Recording says what was missing."""

    def run(module: ModuleType) -> None:
        try:
            hook_module(module)
        except Exception as error:
            window.failed(error)

    return run


def wrap(owner: Any, name: str, around: Around) -> None:
    """Have `owner.name(self, …)` call `around(original, self, …)`. A method that `owner` inherits is left to the class
    that has it; AttributeError where there is none."""
    original = owner.__dict__.get(name)
    if original is None:
        getattr(owner, name)
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **kwargs)

    setattr(owner, name, wrapper)

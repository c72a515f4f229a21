"""Adapters of inference frameworks, one file each: how to start one offline, where its steps begin and end."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kcap.capture.engines.engine import Engine


def find(name: str) -> Engine:
    """The adapter in the file `name`."""
    return cast("Engine", importlib.import_module(f"{__name__}.{name}"))


def adapters() -> list[Engine]:
    """Every adapter: each module of this folder that names its framework."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if "_" not in module.name]
    return [find(name) for name in names if hasattr(find(name), "FRAMEWORK")]


def of_framework(framework: str | None) -> Engine | None:
    """The adapter of `framework`, in any case; None where there is none."""
    wanted = (framework or "").lower()
    return next((engine for engine in adapters() if engine.FRAMEWORK.name.lower() == wanted), None)

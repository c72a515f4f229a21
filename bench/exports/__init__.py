"""The formats of other benchmarks: one file each, its Exporter registered under the file's name with dashes.

A target's module is imported when it is asked for: some take seconds.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kcap.bench.checked_on import CheckedOn
from kcap.bench.contents import Contents
from kcap.schemas.loss import ExportLoss

EXPORTERS: dict[str, Exporter] = {}


@dataclass(frozen=True)
class Request:
    """What to export, the folder to write into, and the measurements to take times from (None: no times).

    `check`: whether references are checked against the recorded operators, `checked_on`: on which device.
    """

    contents: Contents
    output: Path
    measurements: Path | None = None
    check: bool = True
    checked_on: CheckedOn = field(default_factory=CheckedOn)


class Exporter:
    """Writes one target's files. `takes`: whether it is made from Calls, or from Definitions and Workloads."""

    takes: Literal["calls", "definitions"] = "calls"

    def write(self, request: Request) -> ExportLoss:
        """Write into the request's output, which is an empty folder; the loss is the caller's to write."""
        raise NotImplementedError

    def following(self, output: Path) -> str:
        """The command that uses what was written."""
        raise NotImplementedError


def exporter(target: str) -> Callable[[type[Exporter]], type[Exporter]]:
    """Register an Exporter for `target`."""

    def register(kind: type[Exporter]) -> type[Exporter]:
        EXPORTERS[target] = kind()
        return kind

    return register


def targets() -> list[str]:
    """The name of every target: that of its file, with dashes."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def find(target: str) -> Exporter:
    """The Exporter of `target`, one of `targets()`."""
    importlib.import_module(f"{__name__}.{target.replace('-', '_')}")
    return EXPORTERS[target]

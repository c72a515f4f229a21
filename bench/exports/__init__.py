"""The formats of other benchmarks: one file each, its Exporter registered under the file's name with dashes.

A target's module is imported when it is asked for: some take seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kcap.bench.contents import CheckTarget, Contents
from kcap.schemas.results.export_loss import ExportLoss
from kcap.system.registry import Registry, plugin_names

EXPORTERS: Registry[str, Exporter] = Registry("export target")


@dataclass(frozen=True)
class ExportRequest:
    """What to export, the folder to write into, and the measurements to take times from (None: no times).

    `check`: whether references are checked against the recorded operators, `checked_on`: on which device.
    """

    contents: Contents
    output: Path
    measurements: Path | None = None
    check: bool = True
    checked_on: CheckTarget = field(default_factory=CheckTarget)


class Exporter:
    """Writes one target's files. `takes`: made from Calls, from Definitions and Workloads, profiled steps, or turns.

    `takes_times`: from measurements. `needs`: what the command that follows needs beside kcap: `in a clone of
    KernelBench`.
    """

    takes: Literal["calls", "definitions", "steps", "turns"] = "calls"
    takes_times: bool = False
    needs: str = ""

    def write(self, request: ExportRequest) -> ExportLoss:
        """Write into the request's output, which is an empty folder; the loss is the caller's to write."""
        raise NotImplementedError

    def following(self, output: Path) -> str:
        """The command that uses what was written, as a shell takes it."""
        raise NotImplementedError


def exporter(target: str) -> Callable[[type[Exporter]], type[Exporter]]:
    """Register an Exporter for `target`."""

    def register(kind: type[Exporter]) -> type[Exporter]:
        EXPORTERS.add(target, kind())
        return kind

    return register


def targets() -> list[str]:
    """The name of every target: that of its file, with dashes."""
    return sorted(name.replace("_", "-") for name in plugin_names(__name__))


def find_exporter(target: str) -> Exporter:
    """The Exporter of `target`, one of `targets()`."""
    importlib.import_module(f"{__name__}.{target.replace('-', '_')}")
    return EXPORTERS[target]

"""Where Solutions are judged: executors, one file each, registered under the file's name.

An executor gives slots, and each slot is one judge worker on one device. An executor's module is imported when it is
asked for: some need a package of their own.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kcap.bench.judge.messages import JudgeSession
from kcap.bench.run.executors.common.slot import JUDGE_WORKER, Slot
from kcap.system.registry import Registry, plugin_names

EXECUTORS: Registry[str, Executor] = Registry("executor")


@dataclass(frozen=True)
class SlotRequest:
    """What slots are opened for. `device`: `cpu`, `cuda` (all GPUs) or `cuda:N`.

    `session`: what each judge worker is told first, device and scratch folder apart. `most`: slots that have work.
    """

    device: str
    session: JudgeSession
    most: int
    module: str = JUDGE_WORKER


class Executor(ABC):
    """Gives the slots that Solutions are judged on."""

    @abstractmethod
    def check(self, device: str, threads: int | None) -> None:
        """CallError where there is no such device, or the executor cannot be used; nothing is started."""

    @abstractmethod
    def open(self, where: SlotRequest) -> AbstractContextManager[Sequence[Slot]]:
        """At least one slot, none started, at most `where.most`; CallError as for `check`."""


def executor(name: str) -> Callable[[type[Executor]], type[Executor]]:
    """Register an Executor as `name`."""

    def register(kind: type[Executor]) -> type[Executor]:
        EXECUTORS.add(name, kind())
        return kind

    return register


def executors() -> list[str]:
    """The name of every executor: that of its file."""
    return plugin_names(__name__)


def find_executor(name: str) -> Executor:
    """The Executor `name`, one of `executors()`; CallError where its package is missing."""
    importlib.import_module(f"{__name__}.{name}")
    return EXECUTORS[name]

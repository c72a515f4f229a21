"""A slot: one judge worker on one device, given its scratch folder, started again when it dies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from kcap.bench.schedule.common.scratch import scratch
from kcap.errors import KcapError
from kcap.replay.pool import Worker

JUDGE = "kcap.bench.judge.worker"
LIMITS = "of --timeout and --build-timeout"


class Stopped(KcapError):
    """The slot was told to stop."""


class Slot(Protocol):
    """One judge at work, on this machine or another. One thread runs it; any may stop it."""

    def start(self) -> dict[str, Any]:
        """What its judge says of the device; CallError if it has none."""

    def run(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The judge's answer; `status` and `reason` alone where it died or took longer than `limit_s` seconds."""

    def stop(self) -> None:
        """End what it does: `run` returns at once, or raises Stopped."""

    def close(self) -> None:
        """End the judge and remove what it left."""


class LocalSlot:
    """A slot on this machine: a judge worker in a child process."""

    def __init__(self, session: Mapping[str, Any], module: str = JUDGE) -> None:
        self._session = dict(session)
        self._module = module
        self._worker: Worker | None = None
        self._stack = ExitStack()
        self._stopped = False

    def start(self) -> dict[str, Any]:
        folder = self._stack.enter_context(scratch())
        self._worker = Worker({**self._session, "scratch": str(folder)}, self._module, LIMITS)
        self._stack.enter_context(self._worker)
        return self._worker.environment

    def run(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self._stopped or self._worker is None:
            raise Stopped("stopped")
        return self._worker.run(request, limit_s)

    def stop(self) -> None:
        self._stopped = True
        process = self._worker.process if self._worker else None
        if process is not None:
            process.terminate()

    def close(self) -> None:
        self._stack.close()

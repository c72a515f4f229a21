"""A slot: one judge worker on one device, restarted when it dies, with a scratch folder that is never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from kcap.bench.judge.messages import JudgeRequest, JudgeSession
from kcap.errors import CallError, KcapError
from kcap.system.worker_process import Worker

JUDGE_WORKER = "kcap.bench.judge.worker"
LIMITS = "of --timeout and --build-timeout"


class Stopped(KcapError):
    """The slot was told to stop."""


class Slot(Protocol):
    """One judge at work, on this machine or another. One thread runs it; any may stop it."""

    def start(self) -> dict[str, Any]:
        """What its judge says of the device; KcapError if it cannot start there."""

    def run(self, request: JudgeRequest, limit_s: float) -> dict[str, Any]:
        """The judge's answer; `status` and `reason` alone where it died or took longer than `limit_s` seconds."""

    def stop(self) -> None:
        """End what it does: `run` returns at once, or raises Stopped."""

    def close(self) -> None:
        """End the judge and remove what it left."""


class LocalSlot:
    """A slot on this machine: a judge worker in a child process."""

    def __init__(self, session: JudgeSession, module: str = JUDGE_WORKER) -> None:
        self._session = session
        self._module = module
        self._worker: Worker | None = None
        self._stack = ExitStack()
        self._stopped = False

    def start(self) -> dict[str, Any]:
        folder = self._stack.enter_context(scratch_folder())
        self._worker = Worker({**self._session, "scratch": str(folder)}, self._module, LIMITS)
        try:
            self._stack.enter_context(self._worker)
        except CallError as error:  # of this device's judge: others may start
            raise KcapError(str(error)) from None
        return dict(self._worker.environment)

    def run(self, request: JudgeRequest, limit_s: float) -> dict[str, Any]:
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


SCRATCH_PREFIX = "kcap-slot-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder below the machine's temporary one. A lock on it tells that its process lives."""
    home = Path(tempfile.gettempdir())
    _sweep(home)
    unlocked = Path(
        tempfile.mkdtemp(prefix=f".{SCRATCH_PREFIX}", dir=home)
    )  # a name that nobody sweeps until it is locked
    lock = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = unlocked.rename(home / unlocked.name[1:])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(home: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in home.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

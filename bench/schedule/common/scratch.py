"""A scratch folder that is removed, if not by the process that made it, then by the next one that makes another."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "kcap-slot-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder below the machine's temporary one. A lock on it tells that its process lives."""
    home = Path(tempfile.gettempdir())
    _sweep(home)
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=home))  # a name that nobody sweeps until it is locked
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = made.rename(home / made.name[1:])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(home: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

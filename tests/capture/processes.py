"""Whether processes that were started are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def lives(group: int) -> bool:
    """Whether any process of it runs; one that has ended and was not asked for its status does not."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and (fields[0] != "Z" or int(fields[17]) > 1):
                return True
    return False


def ended(group: int) -> bool:
    """Whether it has within some seconds; it is killed if not."""
    deadline = time.monotonic() + 8
    while lives(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not lives(group):
        return True
    os.killpg(group, signal.SIGKILL)
    return False

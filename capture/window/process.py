"""The first line of a shard: what a recorded process says of itself."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from typing import Any

import orjson

LAST = -1000  # among what multiprocessing does at a child's exit, the highest number first
ALONE = 1 << 32  # from here on, numbers of processes rather than of replicas


def process_line(kind: str, reason: str, facts: dict[str, Any]) -> bytes:
    """`kind`, `reason`: which recorder, and why not the native one. `facts`: what the engine adapter knows."""
    import torch

    members = {
        "t": "process",
        "pid": os.getpid(),
        **rank_facts(),
        "recorder": kind,
        "recorder_reason": reason,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else _processor(),
        "driver": _first_match("/proc/driver/nvidia/version", r"Kernel Module.*?([0-9.]{5,})"),
    }
    return orjson.dumps({**members, **facts})


def rank_facts(replica: int = 0, apart: bool = False, replicas: int = 1) -> dict[str, Any]:
    """This process's facts for `Window.start`: `rank` and `world_size` as torchrun counts them, and its replica.

    replica: which of data parallelism's replicas it belongs to. apart: they are worlds of their own to
    torch.distributed, so that their ranks follow one another here. replicas: how many there are, where it is known.
    """
    import torch.distributed as distributed

    rank, size = 0, 1
    if distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun, whose program may not have come to it yet
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    moved, worlds = (replica * size, max(replicas, replica + 1)) if apart else (0, 1)
    return {"rank": rank + moved, "world_size": size * worlds, "places": {"dp": replica}}


def replica_of(facts: dict[str, Any]) -> int:
    """The number of the replica that a process with these facts belongs to; one of its own for a process of no rank."""
    if facts["world_size"] > 1:
        return int(facts["places"].get("dp", 0))
    return ALONE + os.getpid()


def at_exit_of_child(body: Callable[[], None]) -> Callable[[], None]:
    """Call `body` when this process exits normally, if it is a child of multiprocessing's: that may skip `atexit`.

    Returns what undoes it.
    """
    from multiprocessing import parent_process, util  # as PyTorch has done

    if parent_process() is None:
        return lambda: None
    return util.Finalize(None, body, exitpriority=LAST).cancel


def _processor() -> str:
    return _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or "cpu"


def _first_match(path: str, pattern: str) -> str | None:
    try:
        with open(path) as file:
            match = re.search(pattern, file.read())
    except OSError:
        return None
    return match.group(1) if match else None

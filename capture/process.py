"""What a recorded process tells of itself: the first line of its shard."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import orjson


def process_line(kind: str, reason: str, facts: dict[str, Any]) -> bytes:
    """`kind`, `reason`: which recorder, and why not the native one. `facts`: what the engine adapter knows."""
    import torch

    known = {
        "t": "process",
        "pid": os.getpid(),
        "rank": int(facts.pop("rank", 0)),
        "recorder": kind,
        "recorder_reason": reason,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else _processor(),
        "driver": _first_match("/proc/driver/nvidia/version", r"Kernel Module.*?([0-9.]{5,})"),
    }
    return orjson.dumps({**known, **facts})


def _processor() -> str:
    return _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or "cpu"


def _first_match(path: str, pattern: str) -> str | None:
    try:
        with open(path) as file:
            match = re.search(pattern, file.read())
    except OSError:
        return None
    return match.group(1) if match else None

"""What a candidate gets of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kcap.bench.judge.device import Gpu


@dataclass(frozen=True)
class Limits:
    """What a candidate gets. Bytes, and seconds: `timeout` for all that it is asked on one Workload, by the user's
    `option`. `memory` None: what is there.
    """

    device: str
    threads: int
    cores: tuple[int, ...]
    timeout: float
    build_timeout: float
    memory: int | None
    disk: int
    processes: int
    scratch: Path
    hidden: tuple[Path, ...] = ()
    gpu: Gpu | None = None
    option: str = "--timeout"

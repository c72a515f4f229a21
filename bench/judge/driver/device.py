"""What Outcomes and batches need to know of a device: `python -m kcap.bench.judge.driver.device cuda:0` prints it.

A process of its own is asked: one that does not answer can be given up.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from kcap.errors import KcapError
from kcap.replay.timing.device import host_fields, machine_fields

LIMIT_S = 300.0


@dataclass(frozen=True)
class Gpu:
    """Bytes of its last-level cache, and of its free memory."""

    l2: int
    memory: int


def describe_device(device: str, threads: int) -> tuple[dict[str, Any], Gpu | None]:
    """An Outcome's fields, and the GPU; KcapError where `device` cannot be used."""
    if device == "cpu":
        return {**host_fields(), "threads": threads, "torch": torch.__version__}, None
    command = [sys.executable, "-P", "-m", __name__, device]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise KcapError(f"{device}: cannot be used: it does not answer within {LIMIT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise KcapError(f"{device}: cannot be used: {lines[-1][:200] if lines else 'no message'}")
    answer = orjson.loads(done.stdout)
    return answer["fields"], Gpu(**answer["gpu"])


def main() -> None:
    """Print what there is to know of the device named."""
    device = sys.argv[1]
    fields = machine_fields(device, None)
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    gpu = {"l2": int(properties.L2_cache_size), "memory": int(free)}
    sys.stdout.buffer.write(orjson.dumps({"fields": fields, "gpu": gpu}))


if __name__ == "__main__":
    main()

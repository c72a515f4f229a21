"""Which device files are another GPU's: NVML's numbers, played."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcap.system import nvml


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(nvml, "DEVICES", tmp_path)
    return tmp_path


def played(monkeypatch: pytest.MonkeyPatch, failed: int, minor: int, parts: int = 0) -> None:
    def number(handle: Any, answer: Any) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_uint))[0] = minor
        return failed

    def mode(handle: Any, now: Any, later: Any) -> int:
        ctypes.cast(now, ctypes.POINTER(ctypes.c_uint))[0] = parts
        return 0

    library = SimpleNamespace(nvmlDeviceGetMinorNumber=number, nvmlDeviceGetMigMode=mode)
    monkeypatch.setattr(nvml, "opened", lambda device: (library, ctypes.c_void_p()))


def test_every_gpu_but_its_own_is_another(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, failed=0, minor=1)
    assert nvml.other_gpus("cuda:0") == (devices / "nvidia0", devices / "nvidia10")


def test_unknown_where_nvml_cannot_tell(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, failed=3, minor=1)
    assert nvml.other_gpus("cuda:0") is None
    played(monkeypatch, failed=0, minor=1, parts=1)
    assert nvml.other_gpus("cuda:0") is None
    monkeypatch.setattr(nvml, "opened", lambda device: (None, ctypes.c_void_p()))
    assert nvml.other_gpus("cuda:0") is None

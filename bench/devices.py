"""The devices to judge on. A process that never touches CUDA asks a child what GPUs there are."""

from __future__ import annotations

import re
from functools import cache

from kcap.capture.machine import torch_here
from kcap.errors import CallError

NAMES = re.compile(r"cpu|cuda(:\d+)?")


@cache
def gpus() -> tuple[str, ...]:
    """The names of the GPUs that torch can use here."""
    torch = torch_here()
    return tuple(torch.devices) if torch else ()


def chosen(device: str | None, home: str | None) -> str:
    """`cpu`, `cuda` or `cuda:N`: the one asked for, the recorded one (`home`), or a GPU where there is one.

    CallError for any other.
    """
    if device is None:
        return home or ("cuda" if gpus() else "cpu")
    if not NAMES.fullmatch(device):
        raise CallError(f"--device {device}: not a device that kcap knows: cuda, cuda:N or cpu")
    return device


def each(device: str) -> list[str]:
    """The devices that `device` stands for, as torch names them; CallError if this machine does not have it."""
    if device == "cpu":
        return ["cpu"]
    count = len(gpus())
    if not count:
        raise CallError(f"--device {device}: torch finds no CUDA GPU here (kcap doctor says why): pass --device cpu")
    if device == "cuda":
        return [f"cuda:{number}" for number in range(count)]
    if int(device.removeprefix("cuda:")) >= count:
        raise CallError(f"--device {device}: this machine has {count} GPUs: pass --device cuda:0")
    return [device]

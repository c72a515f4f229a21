"""`local`: a judge worker for each GPU of this machine, or one on its CPU; and which devices this machine has.

A process that never touches CUDA asks a child what GPUs there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from kcap.bench.run.executors import Executor, SlotRequest, executor
from kcap.bench.run.executors.common.slot import LocalSlot, Slot
from kcap.errors import CallError
from kcap.system.machine import check_device, torch_here


@cache
def gpus() -> tuple[str, ...]:
    """The names of the GPUs that torch can use here."""
    torch = torch_here()
    return tuple(torch.devices) if torch else ()


def choose_device(device: str | None, home: str | None) -> str:
    """`cpu`, `cuda` or `cuda:N`: the one asked for, the recorded one (`home`), or a GPU where there is one.

    CallError for any other.
    """
    if device is None:
        return home or ("cuda" if gpus() else "cpu")
    check_device(device)
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


@executor("local")
class Local(Executor):
    """Slots in child processes."""

    def check(self, device: str, threads: int | None) -> None:
        each(device)

    @contextmanager
    def open(self, where: SlotRequest) -> Iterator[Sequence[Slot]]:
        devices = each(where.device)[: where.most]
        yield [LocalSlot({**where.session, "device": device}, where.module) for device in devices]

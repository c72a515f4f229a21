"""`local`: a judge worker for each GPU of this machine, or one on its CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kcap.bench.devices import each
from kcap.bench.schedule import Executor, Where, executor
from kcap.bench.schedule.common.slot import LocalSlot, Slot


@executor("local")
class Local(Executor):
    """Slots in child processes."""

    def check(self, device: str, threads: int | None) -> None:
        each(device)

    @contextmanager
    def open(self, where: Where) -> Iterator[Sequence[Slot]]:
        devices = each(where.device)[: where.most]
        yield [LocalSlot({**where.session, "device": device}, where.module) for device in devices]

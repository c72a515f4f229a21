"""What a call wrote to is put back, in every set and no more often than needed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kcap.replay.timing import rotation
from kcap.replay.timing.rotation import InputSnapshot
from kcap.schemas.derive.bound_call import Inputs

KEY = ("cpu", 0)


def made(value: int, buffer: torch.Tensor | None = None) -> Inputs:
    return Inputs([], {}, {KEY: torch.full((4,), value, dtype=torch.uint8) if buffer is None else buffer})


def test_every_set_gets_what_the_first_one_held() -> None:
    sets = [made(7), made(0), made(1)]
    kept = InputSnapshot.of(sets[0], [KEY])
    for inputs in sets:
        inputs.buffers[KEY].fill_(9)
    kept.restore(sets)
    assert [int(inputs.buffers[KEY].sum()) for inputs in sets] == [28, 28, 28]


def test_a_storage_that_sets_share_is_written_once() -> None:
    writes: list[object] = []
    shared = SimpleNamespace(copy_=writes.append)
    content = torch.zeros(4, dtype=torch.uint8)
    sets = [SimpleNamespace(buffers={KEY: shared}) for _ in range(5)]
    InputSnapshot({KEY: content}).restore(sets)  # type: ignore[arg-type]
    assert len(writes) == 1


def test_what_is_too_large_is_left_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(rotation, "MAX_SAVED_BYTES", 3)
    inputs = made(7)
    kept = InputSnapshot.of(inputs, [KEY])
    inputs.buffers[KEY].fill_(9)
    kept.restore([inputs])
    assert int(inputs.buffers[KEY][0]) == 9

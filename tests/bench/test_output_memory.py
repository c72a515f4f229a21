"""What a candidate leaves in shared memory, as the judge copies it."""

from __future__ import annotations

import os

import pytest
import torch

from kcap.bench.judge.driver.protocol import LEAST_PIECE, OUTPUT_PIECES, Layout, OutputMemory, Result

SMALL, LARGE = (
    3,
    LEAST_PIECE // 4 * OUTPUT_PIECES + 5,
)  # elements: a piece, and as many as there can be, none of them full
RESULTS = (
    Result("flags", torch.bool, (SMALL,), 0, 64),
    Result("none", torch.float16, (0, 4), 64, 0),
    Result("all", torch.float32, (LARGE,), 64, 8 * LARGE),
)


@pytest.fixture
def shared():
    made = OutputMemory.allocate(Layout(64 + 8 * LARGE, slots=3, most=1))
    yield made
    made.close()


def left(shared, number, *values):
    """Write these outputs of invocation `number`, and give them back."""
    for value, result in zip(values, RESULTS, strict=True):
        content = value.view(-1).view(torch.uint8).numpy().tobytes()
        os.pwrite(shared.descriptor, content, number * shared.layout.slot + result.offset)
    return list(values)


def some(dtype=torch.float32):
    return torch.rand(SMALL) < 0.5, torch.empty(0, 4, dtype=torch.float16), torch.rand(LARGE).to(dtype)


def test_what_is_changed_later_is_not_looked_at(shared):
    shared.prepare([2, 0], RESULTS, upcast=False)
    truth = {number: left(shared, number, *some()) for number in (0, 1, 2)}
    shared.take()
    left(shared, 0, *some()), left(shared, 2, *some())
    assert sorted(shared.outputs) == [0, 2]
    for number, outputs in shared.outputs.items():
        assert all(map(torch.equal, outputs, truth[number]))


def test_upcast_outputs_are_twice_as_long(shared):
    shared.prepare([1], RESULTS[2:], upcast=True)
    _, _, values = some(torch.float64)
    os.pwrite(shared.descriptor, values.numpy().tobytes(), shared.layout.slot + RESULTS[2].offset)
    shared.take()
    assert torch.equal(shared.outputs[1][0], values)


def test_nobody_knows_where_copying_begins(shared):
    """Who goes on writing from the front would otherwise keep ahead."""
    orders = set()
    for _ in range(5):
        shared.prepare([0, 1], RESULTS, upcast=False)
        orders.add(tuple(at for at, _ in shared.pieces))
    assert len(orders) == 5 and len({tuple(sorted(order)) for order in orders}) == 1
    assert max(piece.size for _, piece in shared.pieces) < 4 * LARGE / (OUTPUT_PIECES - 1)

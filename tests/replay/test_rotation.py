"""Which storages of a Call go round, by cache state."""

from __future__ import annotations

import pytest
import torch
from handmade import call, tensor

from kcap.replay.rebuild import Rebuilder
from kcap.replay.runner import How, rotation_of
from kcap.schemas.measurement import Cache
from kcap.schemas.recording import Call

ROW, WEIGHT = 64 * 4, 64 * 64 * 4
MM = call("aten::mm", tensor(1, 64), tensor(64, 64, storage=1))
RELU = call("aten::relu", tensor(1, 64))


def made(of: Call, cache: Cache):
    rebuilder = Rebuilder("cpu", "cpu", None)
    decided = rebuilder.decide(of, None, cut=True)
    first = rebuilder.build(decided)
    return first, rotation_of(cache, rebuilder, decided, first)


def test_in_serving_the_weight_moves_and_the_activation_stays() -> None:
    first, rotation = made(MM, "serving")
    other = rotation.clone()
    assert other.args[0].data_ptr() == first.args[0].data_ptr()
    assert other.args[1].data_ptr() != first.args[1].data_ptr()
    assert torch.equal(other.args[1], first.args[1])
    assert (rotation.size.total, rotation.size.touched) == (WEIGHT, WEIGHT)


def test_when_cold_everything_moves() -> None:
    first, rotation = made(MM, "cold")
    other = rotation.clone()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(other.args, first.args, strict=True))
    assert rotation.size.total == WEIGHT + ROW


def test_a_call_without_weights_needs_no_second_set_in_serving() -> None:
    _, rotation = made(RELU, "serving")
    assert (rotation.size.total, rotation.size.touched) == (0, 0)
    assert rotation.sets(1.0, 1 << 40, "cuda:0") == 1


def test_of_a_table_only_the_rows_looked_up_are_reached() -> None:
    lookup = call("aten::index_select", tensor(1000, 64), 0, tensor(2, dtype="int64", storage=1))
    _, rotation = made(lookup, "cold")
    assert rotation.size.touched < 4 * ROW < rotation.size.total


@pytest.mark.parametrize(
    ("session", "how"),
    [
        ({}, How("serving", False)),
        ({"cache": None, "kernels": None}, How("serving", False)),
        ({"cache": "cold", "kernels": True}, How("cold", True)),
    ],
)
def test_a_session_says_how_to_time_and_need_not(session: dict[str, object], how: How) -> None:
    assert How.of(session) == how

"""Which storages of a Call go round, by cache state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handmade import call, tensor

from kcap.replay.rebuild import Rebuilder
from kcap.replay.roofline.calls import cost_of
from kcap.replay.runner import How, rotation_of, touched_by
from kcap.schemas.families.cost import Cost
from kcap.schemas.measurement import Cache
from kcap.schemas.recording import Call

ROW, WEIGHT = 64 * 4, 64 * 64 * 4
MM = call("aten::mm", tensor(1, 64), tensor(64, 64, storage=1))
RELU = call("aten::relu", tensor(1, 64))


def made(of: Call, cache: Cache):
    rebuilder = Rebuilder("cpu", "cpu", None)
    decided = rebuilder.decide(of, None, cut=True)
    first = rebuilder.build(decided)
    return first, rotation_of(cache, rebuilder, decided, touched_by(decided, cost_of(of, decided)), first)


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


def test_a_call_without_weights_lies_at_other_places_in_serving_and_none_of_it_is_cold() -> None:
    first, rotation = made(RELU, "serving")
    other = rotation.clone()
    assert other.args[0].data_ptr() != first.args[0].data_ptr()
    assert torch.equal(other.args[0], first.args[0])
    assert (rotation.size.total, rotation.cold, rotation.rotating) == (ROW, False, 0)


def test_of_a_table_only_the_rows_looked_up_are_reached() -> None:
    lookup = call("aten::index_select", tensor(1000, 64), 0, tensor(2, dtype="int64", storage=1))
    _, rotation = made(lookup, "cold")
    assert rotation.size.touched < 4 * ROW < rotation.size.total


@pytest.mark.parametrize(
    ("by_rule", "cost", "reached"),
    [
        (1000, Cost(bytes=60, read=50, flops=0, dtype=""), 60),  # of all experts' matrices those that have tokens
        (1000, Cost(bytes=2000, read=50, flops=0, dtype=""), 1000),
        (80, Cost(bytes=60, read=50, flops=0, dtype=""), 80),  # a rule knows the rows that are looked up
        (1000, Cost(bytes=0, read=0, flops=5, dtype=""), 1000),
        (1000, None, 1000),
    ],
)
def test_where_no_rule_tells_what_is_reached_its_family_does(by_rule: int, cost: Cost | None, reached: int) -> None:
    decided: Any = SimpleNamespace(total=1000, touched=by_rule)
    assert touched_by(decided, cost) == reached


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

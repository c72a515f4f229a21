"""Which storages of a Call go round, by cache state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handmade import call, tensor

from kcap.replay.calls.runner import Runner, TimingOptions, rotation_of_call, touched_bytes
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.roofline.cost import cost_of_call
from kcap.replay.timing import clock, rotation
from kcap.replay.timing.sampling import Budget
from kcap.schemas.derive.bound_call import Inputs
from kcap.schemas.derive.cost import Cost
from kcap.schemas.recording.recording import Call
from kcap.schemas.results.measurement import Cache

ROW, WEIGHT = 64 * 4, 64 * 64 * 4
MM = call("aten::mm", tensor(1, 64), tensor(64, 64, storage=1))
RELU = call("aten::relu", tensor(1, 64))


def made(of: Call, cache: Cache):
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(of, None, timed=True)
    first = rebuilder.build(resolved)
    touched = touched_bytes(resolved, cost_of_call(of, resolved, first))
    return first, rotation_of_call(cache, rebuilder, resolved, touched, first)


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


@pytest.mark.parametrize(
    ("of", "cache", "stays", "fresh"),
    [
        (RELU, "serving", 1 << 20, 0),
        (RELU, "serving", ROW - 1, ROW),  # more than stays: it goes round
        (RELU, "cold", 1 << 20, ROW),
        (RELU, "warm", 1 << 20, 0),
        (MM, "serving", 1 << 20, WEIGHT),
        (MM, "serving", ROW - 1, WEIGHT + ROW),
    ],
)
def test_what_is_read_afresh_is_what_goes_round(
    monkeypatch: pytest.MonkeyPatch, of: Call, cache: Cache, stays: int, fresh: int
) -> None:
    monkeypatch.setattr(rotation, "l2_resident_bytes", lambda device: stays)
    answer = Runner(Rebuilder("cpu", "cpu", None), TimingOptions(cache)).run(of, None, 0.001)
    assert (answer["status"], answer["work"]["fresh"]) == ("ok", fresh)


@pytest.mark.parametrize(("device", "gpu"), [("cpu", False), ("cuda:0", True), ("cuda:0", False)])
def test_each_clock_is_given_its_own_budget(monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool) -> None:
    given: list[Budget] = []
    monkeypatch.setattr(clock, "uses_gpu", lambda first: gpu)
    for name in ("time_cuda", "time_host"):
        monkeypatch.setattr(clock, name, lambda *args: given.extend(one for one in args if isinstance(one, Budget)))
    anything: Any = None
    clock.time_call(device, anything, Inputs([], {}, {}), anything, [], 0.5)
    assert given == [Budget.on("cuda" if gpu else "cpu", 0.5)]


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
    resolved: Any = SimpleNamespace(input_bytes=1000, touched=by_rule)
    assert touched_bytes(resolved, cost) == reached


@pytest.mark.parametrize(
    ("session", "how"),
    [
        ({}, TimingOptions("serving", False)),
        ({"cache": None, "kernels": None}, TimingOptions("serving", False)),
        ({"cache": "cold", "kernels": True}, TimingOptions("cold", True)),
    ],
)
def test_a_session_says_how_to_time_and_need_not(session: dict[str, object], how: TimingOptions) -> None:
    assert TimingOptions.of(session) == how

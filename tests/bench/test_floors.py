"""A judged time below what the machine can do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bench_datasets import definition, of

from kcap.bench.judge.verdict import Floors, Rejected
from kcap.errors import KcapError
from kcap.replay.roofline.ceilings import measure_in_process
from kcap.replay.roofline.cost import cost_of_workload
from kcap.replay.roofline.floor import floor_us
from kcap.schemas.results.outcome import Clocked

pytestmark = pytest.mark.alone

ADD = definition("add", {"x": of("m n"), "y": of("m n")}, {"z": of("m n")}, "x + y", op_type="add")
INPUTS = [torch.zeros(1 << 18, 4), torch.zeros(1 << 18, 4)]


def inputs(rows):
    return dict(zip(("x", "y"), (each[:rows] for each in INPUTS), strict=True))


def drawn_of(*rows):
    """As many rows in each invocation."""
    every = [inputs(count) for count in rows]
    workload = SimpleNamespace(uuid=str(rows))
    return SimpleNamespace(definition=ADD, draws=SimpleNamespace(examples=lambda: every, workload=workload))


DRAWN = drawn_of(1 << 18)


@pytest.fixture(scope="module")
def ceilings():
    return measure_in_process({"device": "cpu", "threads": 1})


def time(us):
    return Clocked(median_us=us, q1_us=us, q3_us=us, method="host", cache="warm")


def floor(ceilings, rows=1 << 18):
    return floor_us(cost_of_workload(ADD, inputs(rows)), ceilings, "warm")


def test_a_time_above_the_floor_is_believed_and_the_floor_told(ceilings):
    floors = Floors({}, lambda env: ceilings, lambda env: pytest.fail("measured again without need"))
    assert floors.check(DRAWN, time(1e6)) == floor(ceilings) > 0


def test_a_time_below_the_floor_is_refused_once_it_was_measured_again(ceilings):
    asked = []
    floors = Floors({}, lambda env: ceilings, lambda env: asked.append(1) or ceilings)
    for _ in range(2):
        with pytest.raises(Rejected, match="below the machine's floor"):
            floors.check(DRAWN, time(floor(ceilings) / 2))
    assert asked == [1]


def test_the_floor_is_that_of_the_least_that_there_may_be_to_do(ceilings):
    floors = Floors({}, lambda env: ceilings, lambda env: ceilings)
    least = floor(ceilings, 1 << 16)
    assert floors.check(drawn_of(1 << 18, 1 << 16, 1 << 17), time(1e6)) == least < floor(ceilings) / 2


def test_a_machine_that_was_busy_when_it_was_measured_is_no_fault(ceilings):
    levels = [level.model_copy(update={"gb_s": 10 * level.gb_s}) for level in ceilings.levels]
    faster = ceilings.model_copy(update={"levels": levels, "tflop_s": {}})
    floors = Floors({}, lambda env: ceilings, lambda env: faster)
    assert floors.check(DRAWN, time(floor(ceilings) / 2)) == floor(faster) < floor(ceilings) / 2


def test_where_nothing_can_be_measured_nothing_is_refused():
    def fails(env):
        raise KcapError("no")

    assert Floors({}, fails, fails).check(DRAWN, time(1e-9)) is None

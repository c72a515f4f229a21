"""What replay says of a time beside its floor, and that a time below it is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from handmade import call
from rich.console import Console

from kcap.errors import KcapError
from kcap.replay.calls import report
from kcap.replay.calls.results import Results, Row
from kcap.replay.jobs import CallJob, SampleGroup
from kcap.replay.roofline.ceilings import Ceilings, descending_levels
from kcap.replay.roofline.cost import least_work
from kcap.replay.roofline.floor import IMPOSSIBLE, Rooflines
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.measurement import Measurement

MIB = 1 << 20
CEILINGS = Ceilings(
    device="cuda:0",
    levels=descending_levels([(0, 8000.0), (100 * MIB, 4000.0)]),
    tflop_s={"bfloat16": 800.0, "float8_e4m3fn": 1500.0},
    cache_bytes=50 * MIB,
)
FLOOR_US = 40 * MIB / 8000e3 / 1.15  # of 40 MiB that may lie in the L2
LINEAR = {"moved": 40 * MIB, "read": 36 * MIB, "flops": 1 << 30, "dtype": "bfloat16"}


def measurement(median_us: float | None, **more: Any) -> Measurement:
    fields = {"call": 0, "operator": "aten::mm", "median_us": median_us, "q1_us": median_us, "q3_us": median_us}
    there = {"method": "graph", "cache": "warm", "device": "cuda:0", "device_name": "H", "work": LINEAR, "n": 10}
    return Measurement.model_validate({**fields, **there, "samples_us": [median_us or 0.0], **more})


def rooflines(*found: Ceilings) -> tuple[Rooflines, list[Mapping[str, Any]]]:
    """Ceilings that are found at first, then those that are measured again; and for what that was asked."""
    asked: list[Mapping[str, Any]] = []

    def again(machine: Mapping[str, Any]) -> Ceilings:
        asked.append(machine)
        return found[-1]

    return Rooflines(lambda machine: found[0], again), asked


def judged(one: Measurement) -> Measurement:
    return rooflines(CEILINGS)[0].judge(one)


def test_a_time_is_told_with_its_floor_and_what_was_achieved():
    roof = judged(measurement(10.0)).roofline
    assert roof is not None
    assert roof.us == pytest.approx(FLOOR_US) and roof.times == pytest.approx(10.0 / FLOOR_US)
    assert roof.gb_s == pytest.approx(40 * MIB / 10e-6 / 1e9)
    assert roof.tflop_s == pytest.approx((1 << 30) / 10e-6 / 1e12)


def test_a_time_below_the_floor_is_refused_with_both_times_and_no_median_is_left():
    one = judged(measurement(FLOOR_US * 0.9))
    assert one.status == "failed" and one.roofline is None
    assert (one.median_us, one.q1_us, one.q3_us) == (None, None, None) and len(one.samples_us) == 1
    reason = f"{IMPOSSIBLE} (4.1{{}} µs; 4.56 µs for {40 * MIB:,} bytes and {1 << 30:,} FLOPs)"
    assert one.reason == reason.format("") + ": the clock or the inputs are wrong"
    assert judged(measurement(FLOOR_US * 1.01)).status == "ok"


def test_only_ceilings_measured_again_refuse_a_time():
    """The machine was busy when they were measured first: it can do twice as much."""
    faster = CEILINGS.model_copy(update={"levels": descending_levels([(0, 16000.0), (100 * MIB, 4000.0)])})
    held, asked = rooflines(CEILINGS, faster)
    first = held.judge(measurement(FLOOR_US * 0.9))
    assert first.status == "ok" and first.roofline is not None
    assert first.roofline.times == pytest.approx(1.8)
    assert held.judge(measurement(FLOOR_US * 0.4)).status == "failed"
    assert len(asked) == 1 and asked[0]["device"] == "cuda:0", "once for a machine"
    assert held.as_json() == [faster.model_dump()]


@pytest.mark.parametrize(
    ("cache", "sets", "n", "floor"),
    [
        ("warm", 1, 10, FLOOR_US),
        ("serving", 4, 10, FLOOR_US),  # 140 MiB, of which half may stay in the L2
        ("serving", 10, 10, 35 * MIB / 4000e3 / 1.15),
        ("cold", 8, 10, 35 * MIB / 4000e3 / 1.15),
        ("cold", 2, 10, FLOOR_US),
        ("cold", 2, 2, 35 * MIB / 4000e3 / 1.15),  # each set once, then a sweep
    ],
)
def test_inputs_that_rotate_count_as_cold_if_they_rotate_over_enough(cache: str, sets: int, n: int, floor: float):
    one = measurement(100.0, cache=cache, input_sets=sets, n=n, work={**LINEAR, "fresh": 35 * MIB})
    roof = judged(one).roofline
    assert roof is not None and roof.us == pytest.approx(floor)


def test_what_the_hosts_clock_timed_was_in_the_caches():
    one = measurement(100.0, method="host", cache="cold", input_sets=1, n=1, work={**LINEAR, "fresh": 36 * MIB})
    roof = judged(one).roofline
    assert roof is not None and roof.us == pytest.approx(FLOOR_US)


def test_what_nobody_knows_or_was_not_timed_is_left_as_it_is():
    for one in (
        measurement(0.001, work=None),
        measurement(0.0, method="none"),
        measurement(None, status="skipped", reason="no"),
        measurement(0.001, work={"flops": 1 << 40, "dtype": "float64"}),  # no such ceiling
    ):
        assert judged(one) == one


def test_without_ceilings_replay_goes_on_and_says_so_once():
    asked: list[Mapping[str, Any]] = []

    def find(machine: Mapping[str, Any]) -> Ceilings:
        asked.append(machine)
        raise KcapError("the ceilings of cuda:0 cannot be measured: no memory")

    held = Rooflines(find)
    assert [held.judge(measurement(1.0)) for _ in range(3)] == [measurement(1.0)] * 3
    assert len(asked) == 1 and list(held.lines()) == ["no floors: the ceilings of cuda:0 cannot be measured: no memory"]


def test_what_stays_in_place_may_be_all_of_what_is_warm():
    """Of 36 MiB read the activations' 1 MiB stays."""
    cost = Cost(40 * MIB, 36 * MIB, 7, "bfloat16")
    assert least_work(cost, MIB) == {**LINEAR, "flops": 7, "fresh": 35 * MIB}
    assert (least_work(cost, 100 * MIB) or {})["fresh"] == 0 and least_work(None, 0) is None


def test_a_rows_floor_is_that_of_its_samples_that_have_one():
    held, _ = rooflines(CEILINGS)
    several = [held.judge(measurement(median)) for median in (FLOOR_US * 2, FLOOR_US * 4)]
    several.append(measurement(100.0, work=None))
    row = Row(CallJob({"decode": 3}, call("aten::mm"), [SampleGroup(None, None)]), several)
    told = row.as_json()
    assert row.times_floor == told["times_floor"] == pytest.approx(3.0)
    assert told["roofline_us"] == pytest.approx(FLOOR_US) and told["bytes"] == 40 * MIB and told["flops"] == 1 << 30
    bare = Row(row.job, [measurement(1.0, work=None)])
    assert bare.times_floor is None and "roofline_us" not in bare.as_json()


def test_a_refused_time_is_in_no_sum():
    held, _ = rooflines(CEILINGS)
    job = CallJob({"decode": 3}, call("aten::mm"), [SampleGroup(None, None)])
    results = Results([Row(job, [held.judge(measurement(0.1))]), Row(job, [held.judge(measurement(10.0))])])
    assert results.gpu_us == pytest.approx(30.0)
    assert [reason.startswith(IMPOSSIBLE) for reason, _, _ in results.reasons("failed")] == [True]


def table(*rows: Row) -> list[str]:
    out = io.StringIO()
    report.print_tables(Console(file=out, width=120), Results(list(rows)), {"device_name": "GPU"}, 40)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_has_the_times_over_the_floor_where_one_is_known():
    held, _ = rooflines(CEILINGS)
    job = CallJob({"decode": 3}, call("aten::mm"), [SampleGroup(None, None)])
    known = [Row(job, [held.judge(measurement(FLOOR_US * times))]) for times in (1e6, 999.4, 998.6, 27.4, 1.44)]
    unknown = Row(job, [measurement(1.0, work=None)])
    lines = table(*known, unknown)
    assert any("× floor" in line for line in lines)
    factors = [line.split()[5] for line in lines if "aten::mm" in line]
    assert factors == ["…", "…", "999", "27", "1.4", "3"]  # the last is its count
    assert "× floor" not in "".join(table(unknown))


def test_the_ceilings_are_said_in_a_line():
    held, _ = rooflines(CEILINGS)
    held.judge(measurement(10.0))
    assert list(held.lines()) == [
        "× floor: the time over the least that cuda:0 could take, at 4,000 GB/s of memory, 800 TFLOP/s bfloat16"
    ]

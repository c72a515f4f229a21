"""A device's rates as the floors of measurements show them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.roofline.ceilings import BandwidthLevel, Ceilings
from kcap.replay.roofline.floor import floor_us
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.measurement import LeastWork, Measurement, Roofline, read_measurements
from kcap.show.estimate import Rates, rates_of_floors

MB = 1 << 20
LEVELS = [BandwidthLevel(size=size, gb_s=gb_s) for size, gb_s in ((0, 20_000), (25 * MB, 8_000), (100 * MB, 4_000))]
CEILINGS = Ceilings(device="cuda", cache_bytes=50 * MB, levels=LEVELS, tflop_s={"bfloat16": 800, "float8_e4m3fn": 1600})


def measured(moved: int, flops: int, dtype: str = "bfloat16") -> Measurement:
    us = floor_us(Cost(moved, moved, flops, dtype), CEILINGS, "cold")
    roofline = Roofline(us=us, times=2, gb_s=1, tflop_s=1)
    work = LeastWork(moved=moved, read=moved, fresh=moved, flops=flops, dtype=dtype)
    return Measurement(call=0, operator="aten::mm", args=[], median_us=2 * us, work=work, roofline=roofline)


def rates(*works: tuple[int, int]) -> Rates | None:
    return rates_of_floors([measured(*work) for work in works], "by floors")


BY_MEMORY, BY_ARITHMETIC = (1000 * MB, 10**9), (600 * MB, 10**13)


@given(st.lists(st.tuples(st.integers(1, 1000 * MB), st.integers(0, 10**13))))
def test_they_are_those_that_the_floors_were_reckoned_with(others: list[tuple[int, int]]) -> None:
    """But for the margin that a floor leaves, whatever else was measured."""
    found = rates(BY_MEMORY, *others, BY_ARITHMETIC)
    assert found is not None
    memory, arithmetic = measured(*BY_MEMORY).roofline, measured(*BY_ARITHMETIC).roofline
    assert memory is not None and arithmetic is not None
    assert abs(found.memory_gb_s * memory.us * 1e3 / BY_MEMORY[0] - 1) < 0.01
    assert abs(found.tflop_s * arithmetic.us * 1e6 / BY_ARITHMETIC[1] - 1) < 0.01


def test_the_rates_of_a_gpu(llama_in_two_engines: Path) -> None:
    found = rates_of_floors(read_measurements(llama_in_two_engines / "vllm.measurements.jsonl"), "by floors")
    assert found is not None and (round(found.memory_gb_s), round(found.tflop_s)) == (5376, 990)


def test_arithmetic_is_that_of_the_dtype_of_most_flops() -> None:
    products = [measured(*BY_MEMORY), measured(*BY_ARITHMETIC), measured(*BY_ARITHMETIC)]
    plain = rates_of_floors(products, "by floors")
    assert plain is not None
    assert rates_of_floors([*products, measured(600 * MB, 10**13, "float8_e4m3fn")], "by floors") == plain


def test_floors_of_one_kind_show_no_roof() -> None:
    assert rates() is None
    assert rates(BY_MEMORY) is None and rates(BY_ARITHMETIC) is None
    assert rates(BY_MEMORY, (10 * MB, 10**6)) is None

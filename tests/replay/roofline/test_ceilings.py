"""Ceilings and floors: which bandwidth applies to what, that a floor is never too high, and how ceilings are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kcap.errors import KcapError
from kcap.replay.roofline import ceilings
from kcap.replay.roofline.ceilings import NARROWER_FACTOR, Ceilings, descending_levels
from kcap.replay.roofline.floor import COLD_FACTOR, MARGINS, floor_us
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.measurement import CACHES

MIB = 1 << 20
RATES = {"float32": 50.0, "tf32": 400.0, "bfloat16": 800.0, "float8_e4m3fn": 1600.0}
LEVELS = [(0, 8000.0), (100 * MIB, 5000.0), (200 * MIB, 4300.0), (800 * MIB, 4200.0)]
GPU = Ceilings(device="cuda:0", device_name="H", levels=descending_levels(LEVELS), tflop_s=RATES, cache_bytes=50 * MIB)
CPU = Ceilings(levels=descending_levels([(0, 2000.0), (1 << 18, 100.0), (1 << 26, 20.0)]), tflop_s={"float32": 0.1})
OF_BYTES, OF_FLOPS = MARGINS["cuda"]


def test_half_of_a_working_set_may_stay_in_a_nearer_cache():
    assert GPU.bandwidth(0) == GPU.bandwidth(199 * MIB) == 8000.0
    assert GPU.bandwidth(200 * MIB) == GPU.bandwidth(399 * MIB) == 5000.0
    assert GPU.bandwidth(1 << 40) == GPU.memory_gb_s == 4200.0


def test_a_larger_working_set_that_measured_faster_raises_the_smaller():
    """The smaller was disturbed: it is as fast at least."""
    assert [level.gb_s for level in descending_levels([(0, 9.0), (10, 3.0), (20, 5.0)])] == [9.0, 5.0, 5.0]


def test_arithmetic_may_be_done_in_a_wider_dtype_but_not_in_a_narrower():
    assert GPU.peak("bfloat16") == GPU.peak("float16") == 800.0
    assert GPU.peak("float32") == 400.0  # by the matrix units
    assert GPU.peak("float64") is None
    assert GPU.peak("int8") == GPU.peak("float8_e5m2") == 1600.0
    assert GPU.peak("float4_e2m1") == GPU.peak("") == NARROWER_FACTOR * 1600.0
    assert CPU.peak("bfloat16") == NARROWER_FACTOR * 0.1
    assert Ceilings(levels=CPU.levels).peak("float32") is None


def test_the_floor_of_a_gemm_is_its_arithmetic_and_of_a_copy_its_bytes():
    flops = 2 * 8192**3
    gemm = Cost(3 * 2 * 8192**2, 2 * 2 * 8192**2, flops, "bfloat16")
    assert floor_us(gemm, GPU, "cold") == pytest.approx(flops / 800e6 / OF_FLOPS)
    copy = Cost(1000 * MIB, 500 * MIB, 0, "bfloat16")
    assert floor_us(copy, GPU, "cold") == pytest.approx(1000 * MIB / 4300e3 / OF_BYTES)


def test_what_is_warm_may_lie_in_the_l2_and_what_is_cold_may_not():
    small = Cost(20 * MIB, 18 * MIB, 0, "bfloat16")
    warm = 20 * MIB / 8000e3 / OF_BYTES
    assert floor_us(small, GPU, "warm") == pytest.approx(warm)
    assert floor_us(small, GPU, "cold") == pytest.approx(18 * MIB / 5000e3 / OF_BYTES)  # over 250 MiB
    assert floor_us(small, GPU, "cold", sets=2) == pytest.approx(warm)  # two sets fit into the L2
    assert floor_us(small, GPU, "cold", sets=100) == pytest.approx(18 * MIB / 4200e3 / OF_BYTES)


def test_in_serving_only_what_rotates_is_cold():
    linear = Cost(40 * MIB, 36 * MIB, 0, "bfloat16")
    assert floor_us(linear, GPU, "serving") == floor_us(linear, GPU, "warm")
    assert floor_us(linear, GPU, "serving", fresh=35 * MIB) == pytest.approx(35 * MIB / 5000e3 / OF_BYTES)
    assert floor_us(linear, GPU, "warm", fresh=35 * MIB) == floor_us(linear, GPU, "warm")


def test_a_cpus_floor_allows_for_its_caches():
    assert floor_us(Cost(100_000, 50_000, 0, ""), CPU) == pytest.approx(100_000 / 2000e3 / 1.5)
    assert floor_us(Cost(1 << 30, 1 << 29, 0, ""), CPU) == pytest.approx((1 << 30) / 20e3 / 1.5)


COSTS = st.builds(
    lambda read, written, flops, dtype: Cost(read + written, read, flops, dtype),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 60),
    st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "float64", "int8", ""]),
)
CEILINGS = st.builds(
    lambda sizes, rates, tflops, cache, device: Ceilings(
        device=device,
        levels=descending_levels(list(zip([0, *sizes], rates, strict=False))),
        tflop_s=tflops,
        cache_bytes=cache,
    ),
    st.lists(st.integers(1, 1 << 40), min_size=3, max_size=3, unique=True),
    st.lists(st.floats(0.1, 1e5), min_size=4, max_size=4),
    st.dictionaries(st.sampled_from(["float32", "tf32", "bfloat16", "float64"]), st.floats(1e-3, 1e4)),
    st.integers(0, 1 << 28),
    st.sampled_from(["cpu", "cuda:0"]),
)
STATES = st.sampled_from(CACHES)


@settings(deadline=None)
@given(COSTS, CEILINGS, STATES, st.integers(0, 1 << 40), st.integers(0, 1 << 60))
def test_a_floor_rises_with_bytes_and_flops(cost: Cost, ceilings: Ceilings, state: Any, more: int, flops: int):
    floor = floor_us(cost, ceilings, state)
    assert floor >= 0
    read = Cost(cost.bytes + more, cost.read + more, cost.flops, cost.dtype)
    written = Cost(cost.bytes + more, cost.read, cost.flops, cost.dtype)
    computed = Cost(cost.bytes, cost.read, cost.flops + flops, cost.dtype)
    assert all(floor_us(other, ceilings, state) >= floor * (1 - 1e-12) for other in (read, written, computed))


@settings(deadline=None)
@given(CEILINGS, STATES)
def test_no_work_has_no_floor(ceilings: Ceilings, state: Any):
    assert floor_us(Cost(), ceilings, state) == 0


@settings(deadline=None)
@given(COSTS, CEILINGS, st.integers(1, 100))
def test_cold_is_never_faster_than_warm_and_more_sets_never_faster(cost: Cost, ceilings: Ceilings, sets: int):
    warm, cold = (floor_us(cost, ceilings, state) for state in ("warm", "cold"))
    assert floor_us(cost, ceilings, "serving") == warm <= cold
    few, many = (floor_us(cost, ceilings, "cold", sets=number) for number in (sets, sets + 1))
    assert few <= many


@settings(deadline=None)
@given(COSTS, CEILINGS, CEILINGS, st.floats(0.1, 10), STATES)
def test_ceilings_measured_again_never_raise_a_floor(
    cost: Cost, one: Ceilings, other: Ceilings, times: float, state: Any
):
    rates = {name: rate * times for name, rate in one.tflop_s.items()}
    other = other.model_copy(update={"device": one.device, "cache_bytes": one.cache_bytes, "tflop_s": rates})
    raised = one.raised(other)
    assert floor_us(cost, raised, state) <= floor_us(cost, one, state) * (1 + 1e-12)
    assert raised.top >= max(one.top, other.top)


@settings(deadline=None)
@given(CEILINGS)
def test_ceilings_are_read_as_they_were_written(ceilings: Ceilings):
    assert Ceilings.model_validate_json(ceilings.line()) == ceilings


def test_ceilings_without_a_bandwidth_are_none():
    with pytest.raises(ValidationError):
        Ceilings(levels=[])


MACHINE = {"device": "cpu", "device_name": "C", "driver": None, "torch": "2.13.0", "threads": 2}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Counting:
    """Measures nothing, and counts how often it was asked."""

    def __init__(self, *found: Ceilings) -> None:
        self.found, self.asked = list(found), 0

    def __call__(self, _: Mapping[str, Any]) -> Ceilings:
        self.asked += 1
        return self.found[min(self.asked, len(self.found)) - 1]


def test_ceilings_are_measured_once_for_a_device_driver_torch_and_number_of_threads(cache: Path):
    measure = Counting(CPU)
    assert (
        ceilings.kept_ceilings(MACHINE, measure)
        == ceilings.kept_ceilings({**MACHINE, "device": "other name"}, measure)
        == CPU
    )
    assert measure.asked == 1
    for name, other in {"device_name": "D", "driver": "570", "torch": "2.11.0", "threads": 1}.items():
        ceilings.kept_ceilings({**MACHINE, name: other}, measure)
    assert measure.asked == 5


def test_a_file_that_is_none_of_ceilings_is_measured_anew(cache: Path):
    measure = Counting(CPU)
    ceilings.kept_ceilings(MACHINE, measure)
    for content in (b"", b"{}", b'{"levels": []}', b"\xff"):
        ceilings.ceilings_path(MACHINE).write_bytes(content)
        assert ceilings.kept_ceilings(MACHINE, measure) == CPU
    assert measure.asked == 5 and not list(cache.rglob("*.tmp"))


def test_measured_again_the_higher_of_both_is_kept(cache: Path):
    slow = Ceilings(
        levels=descending_levels([(0, 2000.0), (1 << 18, 50.0), (1 << 26, 25.0)]), tflop_s={"float32": 0.05}
    )
    ceilings.kept_ceilings(MACHINE, Counting(slow))
    found = ceilings.raised_ceilings(MACHINE, Counting(CPU))
    assert [level.gb_s for level in found.levels] == [2000.0, 100.0, 25.0] and found.tflop_s == {"float32": 0.1}
    assert ceilings.read_ceilings(MACHINE) == found


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "kcap").write_text("a file where the folder should be")
    assert ceilings.kept_ceilings(MACHINE, Counting(CPU)) == CPU


def test_a_device_that_is_not_there_is_told(cache: Path):
    with pytest.raises(KcapError, match="the ceilings of cuda:99 cannot be measured"):
        ceilings.measure_in_process({**MACHINE, "device": "cuda:99"})


def test_cold_means_the_same_in_replay_and_judge():
    from kcap.bench.judge import timing
    from kcap.replay.timing import rotation

    assert COLD_FACTOR == rotation.COLD_FACTOR == timing.COLD_FACTOR

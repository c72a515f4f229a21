"""What counts as right: in units of what a dtype allows, whatever the size of the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench import accuracy
from kcap.bench.accuracy import RTOL, describe_tolerances, difference, worst_accuracy

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def drawn(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_what_is_rounded_to_its_dtype_is_right(dtype, scale):
    if dtype == torch.float8_e4m3fn and scale < 1:
        pytest.skip("below what the dtype can tell apart")
    truth = drawn(1, 64, 64) * scale
    assert difference(truth.to(dtype), truth).error < 0.6


@pytest.mark.parametrize(
    "high, low",
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)],
)
def test_a_product_of_lower_precision_is_wrong(high, low):
    a, b = drawn(1, 64, 256), drawn(2, 256, 64)
    a, b = a.to(high).double(), b.to(high).double()
    truth = a @ b
    assert difference(truth.to(high), truth).error < 0.6
    assert difference((a.to(low).double() @ b.to(low).double()).to(high), truth).error > 1


@given(st.integers(0, 1000), st.sampled_from(FLOATS), st.floats(1e-4, 1e2))
def test_no_constant_is_right(seed, dtype, scale):
    truth = drawn(seed, 16, 32) * scale
    for constant in (0.0, float(truth.mean()), 1.0):
        assert difference(torch.full(truth.shape, constant, dtype=dtype), truth).error > 1


def test_zeros_are_wrong_where_numbers_are_small():
    truth = torch.full((8,), 0.009, dtype=torch.float64)
    assert difference(torch.zeros(8), truth).error > 1


def test_half_of_a_sum_is_wrong():
    a, b = drawn(3, 16, 512), drawn(4, 512, 16)
    half = a[:, :256] @ b[:256]
    assert difference((half * 2).bfloat16(), a @ b).error > 1


def test_inf_and_nan_must_be_where_the_reference_has_them():
    truth = torch.tensor([1.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    assert difference(truth.float(), truth).error == 0
    for wrong in (
        [1.0, math.inf, math.inf, math.nan],
        [1.0, math.nan, -math.inf, math.nan],
        [1.0, 5.0, -math.inf, 1.0],
    ):
        assert difference(torch.tensor(wrong), truth).error == math.inf


def test_nan_is_no_wildcard():
    truth = drawn(5, 8)
    assert difference(torch.full((8,), math.nan), truth).error == math.inf
    assert difference(torch.where(torch.arange(8) == 3, math.nan, truth).float(), truth).error == math.inf


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.float8_e5m2])
def test_the_same_numbers_in_a_wider_dtype_are_no_difference_however_they_are_found_to_be(dtype):
    out = (drawn(1, 40, 1000) * 8).to(dtype)
    truth = out.double().clone()
    truth[3, 5], out[3, 5] = 0.0, -0.0
    truth[7, 1] = out[7, 1] = -math.inf
    rows = accuracy.FloatRows(out, truth)
    assert not rows.unlike and difference(out, truth) == accuracy.Difference(rows.error, rows.worst, rows.relative)
    assert difference(out, truth) == accuracy.Difference()
    out[39, 999] = 100.0
    assert difference(out, truth).error > 1


def test_wide_outputs_of_narrow_inputs_are_as_exact_as_the_reference_is():
    x, w = drawn(1, 64, 512).bfloat16(), drawn(2, 512, 256).bfloat16()
    truth, wide, narrow = x.double() @ w.double(), x.float() @ w.float(), (x @ w).float()
    halves = x[:, :256].float() @ w[:256].float() + x[:, 256:].float() @ w[256:].float()
    parts = (x[:, :256] @ w[:256] + x[:, 256:] @ w[256:]).float()
    assert difference(halves, truth, wide).error < 0.1 and difference(parts, truth, wide).error > 10
    assert all(difference(each, truth, narrow).error < 1 for each in (halves, parts, wide))


def test_what_the_dtype_cannot_hold_must_be_inf():
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert difference(torch.tensor([math.inf, 1.0]).half(), truth).error == 0
    assert difference(torch.tensor([65504.0, 1.0]).half(), truth).error == math.inf


def test_integers_are_equal_and_int8_within_one():
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 2])).error == 0
    assert difference(torch.tensor([1, 3]), torch.tensor([1, 2])).error == math.inf
    assert difference(torch.tensor([1, 3], dtype=torch.int8), torch.tensor([1, 2], dtype=torch.int8)).error == 0
    assert difference(torch.tensor([1, 4], dtype=torch.int8), torch.tensor([1, 2], dtype=torch.int8)).error == math.inf
    assert difference(torch.tensor([True]), torch.tensor([False])).error == math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_an_integer_that_is_off_by_one_is_wrong_however_large(dtype):
    most = True if dtype == torch.bool else torch.iinfo(dtype).max
    truth = torch.full((64,), most, dtype=dtype)
    off = truth.clone()
    off[17] = most - 1
    assert difference(truth, truth).error == 0
    found = difference(off, truth)
    assert found.error == math.inf and found.absolute >= 1


def test_int8_that_is_often_off_by_one_is_wrong():
    truth = torch.arange(-64, 64).to(torch.int8)
    off = truth.clone()
    off[:8] += 1
    assert difference(off, truth).error == 0
    assert difference(truth + 1, truth).error == math.inf


def test_nothing_is_right_where_there_is_nothing():
    assert difference(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)).error == 0


def test_the_worst_of_all_outputs_is_told():
    found = worst_accuracy(
        [difference(torch.zeros(2), torch.ones(2).double()), difference(torch.ones(2), torch.ones(2))], "a", "t", 1
    )
    assert found.error > 1 and found.max_absolute_error == 1 and found.max_relative_error == 1 and found.compared == 1


def test_what_is_allowed_is_said_of_each_dtype():
    rtol = f"{RTOL[torch.bfloat16]:g}"
    floats = f"bfloat16: {rtol} of the element + {rtol} of its row's rms, rms error 0.008"
    told = f"{floats}; int8: 1 in one of 16; int32: equal"
    assert describe_tolerances([torch.bfloat16, torch.bfloat16, torch.int8, torch.int32]) == told


@given(st.integers(0, 1000), st.sampled_from(FLOATS))
def test_a_row_of_small_numbers_must_be_right_beside_large_ones(seed, dtype):
    truth = drawn(seed, 8, 64)
    truth[3] /= 24
    assert difference(truth.to(dtype), truth).error < 0.6
    wrong = truth.clone()
    wrong[3] *= 1 + 8 * RTOL[dtype]
    assert difference(wrong.to(dtype), truth).error > 1


def test_short_rows_are_judged_together():
    """A sum that cancels in one element has the rms of the whole to err by."""
    truth = torch.tensor([[1.0], [1e-6], [-1.0]], dtype=torch.float64)
    assert difference(truth.float() + 1e-5, truth).error < 1


@given(st.integers(0, 1000), st.sampled_from([torch.float16, torch.bfloat16]))
def test_nobody_need_be_better_than_the_reference(seed, dtype):
    """Two orders of a long sum in the dtype itself; a thing that is neither is wrong all the same."""
    a, b = drawn(seed, 16, 1024).to(dtype).double(), drawn(seed + 1, 1024, 32).to(dtype).double()
    parts = [left @ right for left, right in zip(a.split(32, 1), b.split(32), strict=True)]
    truth = torch.stack(parts).sum(0)

    def summed(order):
        total = torch.zeros(16, 32, dtype=dtype)
        for part in order:
            total += part.to(dtype)
        return total

    own, other = summed(parts), summed(parts[::-1])
    assert difference(own, truth, own).error <= 1
    assert difference(other, truth, own).error <= 1
    half = torch.stack(parts[:16]).sum(0).to(dtype)
    assert difference(half, truth, own).error > 1


def test_what_the_dtype_hardly_holds_may_be_inf():
    truth = torch.tensor([65530.0, 65500.0, 1.0], dtype=torch.float64)
    assert difference(torch.tensor([65504.0, math.inf, 1.0]).half(), truth).error <= 1
    assert difference(torch.tensor([math.inf, -math.inf, 1.0]).half(), truth).error == math.inf


def test_a_softmax_of_many_is_right_though_float16_hardly_holds_it():
    truth = torch.softmax(drawn(7, 4, 1 << 17) / 4, dim=-1)
    assert difference(truth.half(), truth).error < 1


def test_counts_may_lie_between_those_of_two_precisions():
    truth, own = torch.tensor([10, 20]), torch.tensor([12, 20])
    assert difference(torch.tensor([11, 20]), truth, own).error == 0
    assert difference(torch.tensor([13, 20]), truth, own).error == math.inf
    assert difference(torch.tensor([11, 21]), truth, own).error == math.inf
    assert difference(torch.tensor([11, 20]), truth, truth).error == math.inf


@pytest.mark.parametrize("tile", [7, 64, 1000])
@pytest.mark.parametrize("special", [None, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.float8_e4m3fn])
def test_in_which_parts_an_output_is_compared_is_all_the_same(monkeypatch, dtype, special, tile):
    if special == math.inf and dtype == torch.float8_e4m3fn:
        pytest.skip("the dtype has no inf")
    whole, parts = [], []
    for shape in ((40, 3), (3, 40), (500,)):
        truth = drawn(1, *shape)
        own = (truth * (1 + RTOL[dtype] * drawn(2, *shape))).to(dtype)
        if special is not None:
            truth.view(-1)[17], own.view(-1)[18] = special, special
        out = (truth * (1 + RTOL[dtype] * drawn(3, *shape))).to(dtype)
        for differences, size in ((whole, 1 << 20), (parts, tile)):
            monkeypatch.setattr(accuracy, "CPU_TILE", size)
            for each in (difference(out, truth), difference(out, truth, own)):
                differences += [each.error, each.absolute, each.relative]
    assert parts == pytest.approx(whole, rel=1e-6) and min(whole) > 0 and max(parts) < math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.float8_e4m3fn])
def test_on_a_gpu_differences_are_those_of_the_cpu(monkeypatch, dtype):
    monkeypatch.setattr(accuracy, "GPU_TILE", 1000)
    truth = drawn(1, 300, 100)
    own, out = ((truth * (1 + RTOL[dtype] * drawn(seed, 300, 100))).to(dtype) for seed in (2, 3))
    truth[7, 7], own[7, 7], out[7, 7], own[8, 8] = (math.nan,) * 4
    here, there = difference(out, truth, own), difference(out.cuda(), truth.cuda(), own.cuda())
    assert [there.error, there.absolute, there.relative] == pytest.approx(
        [here.error, here.absolute, here.relative], rel=1e-5
    )
    assert 0 < here.error < math.inf


def test_what_one_large_row_may_be_off_by_is_not_granted_to_the_others():
    truth = drawn(3, 64, 32)
    truth[5] *= 1e9
    out = truth.float()
    out[7] = 0
    assert difference(truth.float(), truth).error <= 1 < difference(out, truth).error

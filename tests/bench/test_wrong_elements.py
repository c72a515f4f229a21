"""Which elements of an output are wrong and where, and that this agrees with what the judge calls wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.accuracy import RTOL, difference
from kcap.bench.accuracy.wrong_elements import AS_A_WHOLE, wrong_elements
from kcap.schemas.results.outcome import Outcome

DTYPES = [*RTOL, torch.int8, torch.int64, torch.bool]


def drawn(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_right_has_no_wrong_elements(dtype):
    truth = drawn((8, 16), dtype)
    assert wrong_elements("y", truth.clone(), truth) is None


def test_the_worst_element_has_its_index_what_was_expected_and_found_and_what_is_allowed():
    truth = torch.ones(4, 8, dtype=torch.float64)
    out = truth.float()
    out[1, 2], out[3, 7] = 1.5, -2.0
    wrong = wrong_elements("y", out, truth)
    assert (wrong.output, wrong.index, wrong.expected, wrong.found) == ("y", [3, 7], 1.0, -2.0)
    assert wrong.tolerance == pytest.approx(2e-4, rel=1e-3)  # of the element, and of the rms
    assert (wrong.wrong, wrong.total) == (2, 32)


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ((slice(None), slice(None)), "every element"),
        ((5, slice(None)), "row 5 alone of 64"),
        ((63, slice(None)), "row 63 alone of 64 (the last)"),
        ((slice(48, 64), slice(None)), "rows 48 to 63 of 64 (a tail)"),
        ((slice(0, 64), slice(250, 256)), "columns 250 to 255 of 256 (a tail)"),
        ((slice(8, 24), slice(None)), "rows 8 to 23 of 64"),
        ((slice(0, 8), slice(32, 64)), "rows 0 to 7 of 64; columns 32 to 63 of 256"),
    ],
)
def test_rows_columns_and_tails_are_named(place, where):
    truth = torch.ones(64, 256)
    out = truth.clone()
    out[place] = 7
    assert wrong_elements("y", out, truth).where == where


def test_tiles_are_told_by_their_length():
    truth = torch.ones(256, 4)
    out = truth.clone()
    out.view(8, 32, 4)[1::2] = 0  # every second tile of 32 rows
    wrong = wrong_elements("y", out, truth)
    assert wrong.axes[0].tile == 32
    assert wrong.where == "rows 32 to 255 of 256 (128 of them, in tiles of 32)"


def test_what_is_scattered_is_not_given_a_place():
    truth = drawn((64, 64), torch.float64)
    out = truth.float()
    out[torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) > 0.5] += 1
    out[7] = truth[7]
    assert wrong_elements("y", out, truth).where == "elements all over the output"


def test_axes_have_the_names_of_the_definition():
    truth = torch.ones(2, 3, 4)
    out = truth.clone()
    out[:, 1] = 0
    wrong = wrong_elements("y", out, truth, ("batch", "head", "dim"))
    assert [axis.axis for axis in wrong.axes] == ["batch", "head", "dim"]
    assert wrong.where == "head 1 alone of 3"


def test_nan_is_the_worst_and_is_counted():
    truth = torch.ones(3, 3, dtype=torch.float64)
    out = truth.to(torch.bfloat16)
    out[0, 0], out[2, 1], out[2, 2] = 50.0, math.nan, math.nan
    wrong = wrong_elements("y", out, truth)
    assert (wrong.found, wrong.index, wrong.wrong, wrong.not_a_number) == ("nan", [2, 1], 3, 2)


def test_what_is_off_only_as_a_whole_says_so():
    truth = drawn((64, 64), torch.float64)
    rough = truth + 0.5 * RTOL[torch.float32] * (truth.abs() + 1)  # within each element's bound, never above zero error
    wrong = wrong_elements("y", rough.float(), truth)
    assert (wrong.wrong, wrong.where, wrong.axes) == (0, AS_A_WHOLE, [])


def test_an_outcome_carries_them_and_reads_them_again():
    truth = torch.ones(4, dtype=torch.float64)
    wrong = wrong_elements("y", torch.tensor([1, math.inf, 1, 1]), truth)
    outcome = Outcome(solution="s", definition="d", workload="w", status="INCORRECT_NUMERICAL", wrong=[wrong])
    assert Outcome.model_validate_json(outcome.line()) == outcome
    assert outcome.wrong[0].found == "inf"


def test_a_scalar_output_is_one_element():
    wrong = wrong_elements("y", torch.tensor(3.0), torch.tensor(1.0, dtype=torch.float64))
    assert (wrong.index, wrong.where, wrong.expected) == ([], "every element", 1.0)


@pytest.mark.parametrize(
    ("out", "truth"),
    [(torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(0)), (torch.ones(2).int(), torch.ones(2).long())],
    ids=["shape", "no elements", "dtype"],
)
def test_what_cannot_be_compared_has_none(out, truth):
    assert wrong_elements("y", out, truth) is None


SPECIALS = st.sampled_from([0.0, 1e-3, 0.05, 1.0, math.inf, -math.inf, math.nan])


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), min_size=0, max_size=3),
    st.lists(st.tuples(st.integers(0, 200), SPECIALS), max_size=4),
    st.integers(0, 5),
)
def test_there_are_wrong_elements_exactly_where_the_judge_calls_an_output_wrong(dtype, shape, changes, seed):
    truth = drawn(tuple(shape), dtype, seed)
    out = truth.clone()
    for place, by in changes:
        flat = out.view(-1)
        if dtype.is_floating_point:
            flat[place % flat.numel()] = (flat[place % flat.numel()].double() + by).to(dtype)
        elif math.isfinite(by):
            flat[place % flat.numel()] = truth.view(-1)[place % flat.numel()] + int(by > 0.01) + int(by > 0.5)
    if dtype.is_floating_point:
        truth = truth.double()
    wrong = wrong_elements("y", out, truth)
    assert (wrong is None) == (difference(out, truth).error <= 1)
    if wrong is not None and wrong.wrong:
        positions = [axis.positions for axis in wrong.axes]
        assert max([*positions, 1]) <= wrong.wrong <= math.prod([*positions, 1])
        assert all(axis.first <= at <= axis.last for axis, at in zip(wrong.axes, wrong.index, strict=True))

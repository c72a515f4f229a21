"""A reference is the truth in the highest precision that means the same, and only where it passes itself."""

from __future__ import annotations

import hashlib
import math
import random

import pytest
import torch
from bench_datasets import definition, of
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.accuracy import Truth, difference
from kcap.bench.accuracy.rounding import rounds_to
from kcap.bench.judge.reference import (
    AtFault,
    check_as_solution,
    comparisons_needed,
    settle_precision,
    with_widest_spread,
    without_copies,
)
from kcap.replay.datasets.reference import compile_reference
from kcap.replay.datasets.spreads import spreads_for
from kcap.schemas.flashinfer.definition import from_bytes, to_bytes

COARSE = definition("coarse", {"x": of("m n", "bfloat16")}, {"y": of("m n")}, "x.float()")
SCALE = definition("scale", {"x": of("m n")}, {"y": of("m n")}, "x * 2")


def drawn(seed, dtype=torch.bfloat16):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def settled(run):
    """The bits in which a reference is the truth, of three draws."""
    inputs = [drawn(seed) for seed in range(3)]
    upcast = {64: torch.float64, 32: torch.float32}
    return settle_precision(
        COARSE,
        [[run(x)] for x in inputs],
        lambda bits: [[out.double() if (out := run(x.to(upcast[bits]))).is_floating_point() else out] for x in inputs],
    )


def test_rounding_leaves_the_truth_in_the_highest_precision():
    assert settled(lambda x: (x * 2 + 1).to(x.dtype)) == 64
    assert settled(lambda x: (x * 1.7).float() * 2) == 64  # float32, as coarse as what was rounded on the way
    assert settled(lambda x: (x * 3 > 0.5).sum(-1)) == 64  # bfloat16 rounds some products to the threshold


def test_what_means_something_else_in_another_dtype_stays_in_its_own():
    assert settled(lambda x: x * torch.finfo(x.dtype).eps) == 0
    assert settled(lambda x: x.sort(dim=-1, stable=True)[1].roll(int(x.dtype == torch.bfloat16), -1)) == 0
    assert settled(lambda x: x.float() if x.dtype == torch.float64 else x * 1.5) == 32


def test_one_draw_of_three_decides():
    last = float(drawn(2)[0, 0])
    assert settled(lambda x: x * (2 if x.dtype != torch.bfloat16 and float(x[0, 0]) == last else 1)) == 0


def test_a_reference_that_does_not_pass_is_at_fault():
    x = drawn(1, torch.float32)
    check_as_solution(SCALE, [x], Truth([x.double()]))
    for wrong, words in ((x * 1.1, "times what is allowed"), (torch.full_like(x, math.nan), "its y is another")):
        with pytest.raises(AtFault, match="judged as a Solution, does not pass") as fault:
            check_as_solution(SCALE, [wrong], Truth([x.double()]))
        assert words in str(fault.value)


@given(st.integers(0, 1000))
def test_what_rounds_to_the_truth_passes_as_a_solution(seed):
    """So a Workload is never opened with a truth that condemns its own reference."""
    x, w = drawn(seed), drawn(seed + 1)
    own = (x * w).to(torch.bfloat16).cumsum(-1, dtype=torch.bfloat16)
    higher = (x.double() * w.double()).cumsum(-1)
    if rounds_to(COARSE, [own], [higher], {}):
        assert difference(own, higher, own).error <= 1


def test_the_widest_spread_that_the_reference_bears_is_taken():
    tried = []

    def attempt(spread):
        tried.append(spread)
        if spread.octaves > 0.2:
            raise AtFault("overflows")
        return spread

    assert with_widest_spread(spreads_for(SCALE), attempt) == tried[-1] and len(tried) == 3
    with pytest.raises(AtFault, match="nowhere"):
        with_widest_spread(spreads_for(SCALE), lambda spread: (_ for _ in ()).throw(AtFault("nowhere")))


CACHE = definition(
    "store",
    {"k": of("m n"), "cache": of("m n"), "slots": of("m", "int64")},
    {"cache_out": of("m n")},
    "",
    reference="""import torch


def run(k, cache, slots):
    out = cache.clone(memory_format=torch.contiguous_format)
    out[slots] = k
    return out
""",
)


def test_what_may_be_written_is_timed_without_a_copy():
    k, cache, slots = torch.ones(1, 4), torch.zeros(3, 4), torch.tensor([1])
    pure, in_place = (compile_reference(of_.reference, "store") for of_ in (CACHE, without_copies(CACHE)))
    expected = pure(k, cache, slots)
    assert not cache.any()
    out = in_place(k, cache, slots)
    assert out is cache and torch.equal(out, expected)
    assert without_copies(SCALE) is SCALE


def test_a_tag_or_the_names_say_what_is_written():
    assert CACHE.written_inputs == {"cache": "cache_out"}
    assert SCALE.written_inputs == {}
    inputs, new = {"conv": of("m n"), "state": of("m n")}, {"new_state": of("m n")}
    assert definition("a", inputs, new, "state").written_inputs == {"state": "new_state"}
    tagged = definition("a", inputs, new, "state", tags=["in_place:conv=new_state"])
    assert from_bytes(to_bytes(tagged)).written_inputs == {"conv": "new_state"}
    other_shape = definition("a", {"x": of("m n")}, {"x_out": of("m")}, "x[:, 0]")
    other_dtype = definition("a", {"x": of("m n")}, {"x_out": of("m n", "int32")}, "x.int()")
    assert other_shape.written_inputs == other_dtype.written_inputs == {}


def truths(values, count, seed=0):
    source = random.Random(seed)
    return [hashlib.sha256(bytes([source.randrange(values)])).digest() for _ in range(count)]


@pytest.mark.parametrize("values, entries", [(2, 1), (8, 1), (8, 4), (100, 1), (100, 16)])
def test_a_constant_and_a_table_fail_999_times_in_a_thousand(values, entries):
    """Whichever sample of the truth the number was taken from, nearly: two sigmas."""
    enough = 0
    for seed in range(40):
        needed = comparisons_needed(truths(values, 64, seed), entries)
        assert needed is not None and needed < 400
        enough += (entries / values) ** needed < 1e-3
    assert enough >= 38


def test_outputs_that_are_never_the_same_need_few():
    assert comparisons_needed([bytes([number]) for number in range(9)]) <= 9
    assert comparisons_needed([b"a"] * 50) is None
    assert comparisons_needed([b"a"] * 9 + [b"b"]) > 20

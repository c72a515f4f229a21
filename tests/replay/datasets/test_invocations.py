"""Each invocation has inputs of its own, within what is valid, and such that who skips work is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from definitions import PAGED, definition, tensor, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.replay.datasets import invocations
from kcap.replay.datasets.invocations import InvocationDraws
from kcap.replay.datasets.spreads import NARROW, OF_PRODUCTS, WIDE, contracts, spreads_for
from kcap.schemas.flashinfer.definition import DefinitionTensor

FLOATS = ["float32", "float16", "bfloat16"]
ROWS = definition({"x": tensor("float32", "M", "D"), "w": tensor("float32", "D")}, {"M": None, "D": 256})


def draws_of(of, secret=1, spread=None, scalars=None, **axes):
    return InvocationDraws(of, workload(of, scalars=scalars, **axes), None, secret, spread)


def of_dtype(dtype, width, **more):
    return definition({"x": tensor(dtype, "M", "D")}, {"M": None, "D": width}, **more)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([*FLOATS, "float8_e4m3fn", "int8", "int32", "int64", "bool"]),
    st.integers(1, 9),
    st.sampled_from([1, 3, 16, 33, 64, 100, 128]),
    st.integers(0, (1 << 63) - 1),
)
def test_a_batch_holds_what_each_of_its_invocations_is_given(dtype, rows, width, seed):
    draws = draws_of(of_dtype(dtype, width), M=rows)
    shape = (3, rows, width)
    memory = torch.zeros(3, rows * width + 7, dtype=draws.example.inputs[0].dtype)  # sets of inputs lie apart
    place = memory[:, : rows * width].view(shape)
    draws.fill(seed, 5, [place])
    for offset in range(3):
        (alone,) = draws.draw(seed, 5 + offset)
        assert torch.equal(alone.view(torch.uint8), place[offset].contiguous().view(torch.uint8))
    assert not memory[:, rows * width :].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_number_of_an_invocation_recurs_in_another(dtype):
    """Else a function of one element could be looked up."""
    draws = draws_of(of_dtype(dtype, 4096), M=16)
    first, second = (draws.draw(7, number)[0].flatten() for number in (0, 1))
    shared = torch.isin(first, second).float().mean()
    assert shared < (0.01 if dtype == "float32" else 0.95)  # float16 has too few numbers


@settings(deadline=None, max_examples=10)
@given(st.integers(0, (1 << 62) - 1), st.sampled_from(FLOATS))
def test_rows_differ_in_scale_mean_and_energy(seed, dtype):
    draws = draws_of(of_dtype(dtype, 4096), M=64)
    x = draws.draw(seed, 0)[0].double()
    assert x.isfinite().all()
    middle, mean = x.median(dim=-1, keepdim=True).values, x.mean(dim=-1)
    spread = (x - middle).abs().median(dim=-1).values
    assert spread.max() / spread.min() > 2 and (mean / spread).std() > 0.4
    pierced = (x.abs().amax(dim=-1) > 14 * spread).double().mean()
    assert 0.2 < pierced < 0.8  # in the others each element counts


@pytest.mark.parametrize("columns", [16384, 128256])
def test_a_constant_in_the_place_of_a_statistic_is_wrong(columns):
    """With standard normal numbers each of these is a constant within a percent."""
    draws = draws_of(of_dtype("float32", columns), M=4)
    x = torch.cat([draws.draw(seed, 0)[0].double() for seed in range(8)])
    for statistic in (x.pow(2).mean(-1).sqrt(), x.std(-1), torch.logsumexp(x, -1)):
        assert (statistic / statistic.median() - 1).abs().median() > 0.03


def test_columns_differ_by_invocation():
    """A norm over the rows is no constant, however many there are."""
    draws = draws_of(of_dtype("float32", 32), M=4096)
    norms = torch.stack([draws.draw(seed, 0)[0].pow(2).mean(0).sqrt().median() for seed in range(8)])
    assert norms.std() / norms.mean() > 0.1


def test_inputs_of_a_product_have_no_mean_that_hides_the_rest():
    product = of_dtype("float32", 4096, reference="def run(x):\n    return x @ x.T\n")
    x = draws_of(product, M=64).draw(3, 0)[0]
    assert (x.mean(-1) / x.std(-1)).abs().max() < 0.1


@pytest.mark.parametrize(
    "body, product",
    [("x @ x.T", True), ("torch.einsum('ij,kj', x, x)", True), ("F.linear(x, x)", True), ("(x * x).sum()", False)],
)
def test_products_are_told_by_the_reference(body, product):
    text = f"import torch\nimport torch.nn.functional as F\n\n\ndef run(x):\n    return {body}\n"
    assert contracts(text) is product
    assert spreads_for(of_dtype("float32", 4, reference=text))[0] == (OF_PRODUCTS if product else WIDE)


def test_the_narrowest_spread_is_close_to_what_others_draw():
    x = draws_of(of_dtype("float32", 4096), spread=NARROW, M=64).draw(3, 0)[0]
    assert 0.8 < float(x.std()) < 1.2 and x.abs().max() < 8


ROUTED = definition(
    {"ids": tensor("int32", "T", "K"), "x": tensor("float32", "T", "D"), "experts": tensor("int32", "E")},
    {"T": None, "K": 2, "D": 4, "E": 8},
)


def test_integers_of_which_nothing_is_known_are_drawn_each_time():
    draws = draws_of(ROUTED, T=64)
    drawn = [draws.draw(1, number)[0] for number in range(50)]
    assert len({tuple(ids.flatten().tolist()) for ids in drawn}) == 50
    assert min(int(ids.min()) for ids in drawn) == 1 and max(int(ids.max()) for ids in drawn) == 7


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32"])
def test_the_mean_of_integers_differs_by_row(dtype):
    """Else it is a constant in the last place of bfloat16."""
    x = draws_of(of_dtype(dtype, 16384), M=64, spread=WIDE).draw(3, 0)[0].double()
    assert x.mean(-1).std() > 0.05 * x.std()
    if dtype == "int8":  # of a product it would hide the rest
        x = draws_of(of_dtype(dtype, 16384), M=64, spread=OF_PRODUCTS).draw(3, 0)[0].double()
        assert x.mean(-1).std() < 0.05 * x.std()


@pytest.mark.parametrize(
    "body, low, high",
    [
        ("x + 1", 1, 63),
        ("x.float()", 1, 7),
        ("(x >> 4 & 15).float()", -(1 << 31), (1 << 31) - 1),
        ("1 >> x", 1, 7),
    ],
)
def test_integers_are_as_wide_as_the_reference_takes_them(body, low, high):
    """Of packed numbers every bit counts; what may be divided by a block's size is longer than a block."""
    output = tensor("float32" if "float" in body else "int32", "M", "D")
    reference = f"import torch\n\n\ndef run(x):\n    return {body}\n"
    of = definition(
        {"x": tensor("int32", "M", "D")}, {"M": None, "D": 4096}, reference=reference, outputs={"y": output}
    )
    wide = draws_of(of, M=64)
    x = wide.draw(3, 0)[0].double()
    assert low <= x.min() < low + (high - low) / 50 + 1 and high >= x.max() > high - (high - low) / 50 - 1
    assert wide.example.notes == [f"drawn from {low} to {high}, for no rule knows it: x"]
    narrow = draws_of(of, spread=spreads_for(of)[-1], M=64).draw(3, 0)[0]
    assert (int(narrow.min()), int(narrow.max())) == (1, 7)


@pytest.mark.parametrize(
    "body, words",
    [
        ("x[g] * (q >> s)", {"q"}),
        ("(x * q) >> 4 & g", {"q"}),
        ("x[g] + (torch.stack([q]).max() >> 4)", {"q"}),
        ("(lambda y: y >> 4)(q)", {"q", "g", "s"}),
        ("q << 4", set()),
        ("torch.bitwise_right_shift(q, s)", {"q"}),
        ("q.bitwise_right_shift(4)", {"q"}),
        ("q << s >> s", {"q"}),
        ("q[g] >> 4", {"q"}),
        ("torch.gather(q, 0, g) >> 4", {"q"}),
        ("q.index_select(0, g) >> s", {"q"}),
    ],
)
def test_packed_words_are_the_inputs_that_are_shifted(body, words):
    """An index beside them stays one, and so does a number of bits."""
    inputs = {name: tensor("int32", "M") for name in "qgs"}
    reference = f"import torch\n\n\ndef run(x, q, g, s):\n    return {body}\n"
    of = definition({"x": tensor("float32", "M"), **inputs}, {"M": None}, reference=reference)
    spreads = spreads_for(of)
    assert set(spreads[0].integers) == words and not spreads[-1].integers
    assert [replace(spread, integers={}) for spread in spreads[:3]] == [WIDE, OF_PRODUCTS, NARROW]


def test_packed_words_may_be_any_one_of_those_that_were_computed_with():
    inputs = {"w": tensor("int32", "M"), "idx": tensor("int32", "M")}
    reference = "def run(x, w, idx):\n    q = w[idx]\n    return x * (q >> 4)\n"
    of = definition({"x": tensor("float32", "M"), **inputs}, {"M": None}, reference=reference)
    assert [{*spread.integers} for spread in spreads_for(of)[::3]] == [{"w", "idx"}, {"w"}, {"idx"}, set()]


def test_integers_that_count_may_be_indices_into_the_shortest_axis():
    inputs, constant = {"counts": tensor("int32", "M", "N")}, {"M": None, "N": 4096, "K": 4}
    of = definition(inputs, constant, reference="def run(counts):\n    return counts.sum(-1)\n")
    for size, most in ((64, 63), (5, 1000), (4096, 1000)):
        assert draws_of(of, M=size).spread.integers == {"counts": (1, most)}


@pytest.mark.parametrize("cheap", [1.0, 0.0])
def test_what_a_rule_makes_is_made_afresh_and_stays_valid(monkeypatch, cheap):
    monkeypatch.setattr(invocations, "CHEAP_RULE_S", cheap)
    monkeypatch.setattr(invocations, "VARIANTS_S", 60.0)  # on a busy machine a rule takes long
    draws = draws_of(PAGED, T=64, L=9, N=40, num_pages=64)
    seen = set()
    for number in range(40):
        _, indptr, indices, cache = draws.draw(3, number)
        assert indptr[0] == 0 and indptr[-1] == 64 and bool((indptr.diff() >= 0).all())
        assert int(indices.min()) >= 0 and int(indices.max()) < len(cache) and len(indices.unique()) == 40
        seen.add((tuple(indptr.tolist()), tuple(indices.tolist())))
    assert len(seen) == 40 if cheap else len(seen) > 25
    again = draws.draw(3, 7)
    draws.draw(4, 7)
    assert all(torch.equal(a, b) for a, b in zip(again, draws.draw(3, 7), strict=True))
    other = draws.draw(4, 7)
    assert not torch.equal(again[2], other[2])


def test_who_remembers_what_a_rule_made_is_told_how_many_are_of_their_own(monkeypatch):
    """Where nothing else varies, a batch is no longer than that."""
    monkeypatch.setattr(invocations, "CHEAP_RULE_S", 0.0)
    of = definition({"probs": tensor("float32", "B", "V")}, {"B": None, "V": 4096}, op_type="sampling")
    draws = draws_of(of, B=64)
    count = draws.distinct
    assert count is not None and 4 <= count <= 256
    first = [draws.draw(3, number)[0][0, 0].item() for number in range(count + 1)]
    assert len({*first[:-1]}) == count and first[-1] == first[0]
    assert draws_of(PAGED, T=64, L=9, N=40, num_pages=64).distinct is None
    monkeypatch.setattr(invocations, "CHEAP_RULE_S", 1.0)
    assert draws_of(of, B=64).distinct is None


def test_examples_differ_in_what_rules_make_alone():
    every = list(draws_of(PAGED, T=64, L=9, N=40, num_pages=64).examples(4))
    assert len({tuple(inputs["indptr"].tolist()) for inputs in every}) == 4
    assert len({inputs["q"].data_ptr() for inputs in every}) == 1
    assert len(list(draws_of(ROWS, M=2).examples(4))) == 1


def test_scalars_and_given_inputs_stay():
    eps = DefinitionTensor(shape=None, dtype="float32")
    of = definition({"x": tensor("float32", "N"), "eps": eps}, {"N": 4})
    draws = draws_of(of, scalars={"eps": 0.5})
    assert draws.varied and draws.draw(1, 1)[1] == 0.5


def test_another_secret_gives_other_inputs():
    one, other = (draws_of(ROWS, secret, M=2).draw(1, 1)[0] for secret in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_long_vocabularies_stay_within_the_dtype(dtype):
    x = draws_of(of_dtype(dtype, 128256), M=8).draw(5, 0)[0]
    assert float(x.abs().max()) < 4 * math.sqrt(128256) * 4

"""Of equal scores either may be chosen; what was not chosen by scores must be the same."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.bench.accuracy import SAME, Choice, difference
from kcap.bench.check import choices
from kcap.bench.check.choices import ChoiceRecorder, has_choices, scoring_definition, sizing_definition, truth_of
from kcap.replay.datasets.reference import compile_reference
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, DefinitionTensor

HEAD = "import torch\n\n\ndef run({}):\n    return {}\n"


def of(body, inputs, outputs):
    """A Definition of tensors [B, V], or [V, V] named w; outputs of any dtype."""
    tensors = {name: DefinitionTensor(shape=["B", "V"], dtype="float32") for name in inputs}
    return Definition(
        name="chooses",
        op_type="test",
        axes={"B": AxisVar(), "V": AxisConst(value=64)},
        inputs=tensors,
        outputs={name: DefinitionTensor(shape=["B"], dtype=dtype) for name, dtype in outputs.items()},
        reference=HEAD.format(", ".join(inputs), body),
    )


def run(definition, inputs):
    returned = compile_reference(definition.reference, definition.name)(*inputs)
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def truth(definition, inputs):
    """As the judge finds it: sizes first, then both precisions."""
    sizes = run(sizing_definition(definition), inputs)[-1]
    scoring = scoring_definition(definition, sizes)
    assert list(scoring.inputs) == list(definition.inputs)
    higher = [x.double() if x.is_floating_point() else x for x in inputs]
    return truth_of(definition, run(scoring, higher), run(scoring, inputs), sizes)


def passes(found, outputs):
    return all(off.error <= SAME for off in found.differences(outputs))


GREEDY = of("torch.softmax(x / 0.7, -1).argmax(-1)", ["x"], {"token": "int64"})
PRODUCT = of("(h @ w.T).argmax(-1)", ["h", "w"], {"token": "int64"})
TOPK = of("torch.topk(x, 8, -1)", ["x"], {"values": "float32", "ids": "int64"})
ROUTE = of("route(x)", ["x"], {"weights": "float32", "ids": "int32"}).model_copy(
    update={
        "reference": """import torch


def run(x):
    p = torch.softmax(x, -1, dtype=torch.float32 if x.dtype != torch.float64 else x.dtype)
    ids = p.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    w = p.gather(-1, ids)
    return w / w.sum(-1, keepdim=True), ids.to(torch.int32)
"""
    }
)


def logits(seed, rows=8, columns=64, dtype=torch.bfloat16):
    """So coarse that scores are often the same."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (drawn * 4).round().div(4).to(dtype)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_the_reference_passes_whatever_its_rounding(seed):
    x, w = logits(seed), logits(seed + 1, 64)
    fine = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for definition, inputs in ((GREEDY, [x]), (GREEDY, [fine]), (PRODUCT, [fine, w]), (TOPK, [x]), (ROUTE, [fine])):
        assert passes(truth(definition, inputs), run(definition, inputs)), definition.reference


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_who_chooses_otherwise_among_equal_scores_passes(seed):
    x = logits(seed)
    last = 63 - x.flip(-1).argmax(-1)
    assert passes(truth(GREEDY, [x]), [last])
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    assert passes(truth(TOPK, [x]), [values[:, :8].contiguous(), ids[:, :8].contiguous()])
    p = torch.softmax(x.float(), -1)
    flipped = p.flip(-1).sort(dim=-1, descending=True, stable=True)
    weights = flipped.values[:, :4]
    assert passes(truth(ROUTE, [x]), [weights / weights.sum(-1, keepdim=True), (63 - flipped.indices[:, :4]).int()])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 7), st.integers(0, 63))
def test_who_chooses_a_worse_one_does_not(seed, row, index):
    x = logits(seed)
    token = run(GREEDY, [x])[0]
    token[row] = index
    assert passes(truth(GREEDY, [x]), [token]) == (x[row, index] == x[row].max())
    values, ids = run(TOPK, [x])
    found = truth(TOPK, [x])
    twice = ids.clone()
    twice[row, 1] = ids[row, 0]
    assert not passes(found, [values, twice])
    for beyond in (-1, 64):
        twice[row, 1] = beyond
        assert not passes(found, [values, twice])
    swapped = ids.clone()
    swapped[row, [0, 7]] = ids[row, [7, 0]]
    assert passes(found, [values, swapped]) == (values[row, 0] == values[row, 7])


def test_what_rounding_hides_either_may_choose_and_no_other():
    """In bfloat16 the two largest products are the same; the third is not."""
    h = torch.zeros(1, 64)
    h[0, :2] = torch.tensor([1.0, 1 / 512])
    w = torch.zeros(64, 64)
    w[3, :2], w[9, :2], w[5, 0] = torch.tensor([8.0, 1.0]), torch.tensor([8.0, 2.0]), 7.5
    found = truth(PRODUCT, [h.bfloat16(), w.bfloat16()])
    assert [passes(found, [torch.tensor([index])]) for index in (3, 9, 5, 0)] == [True, True, False, False]


@pytest.mark.parametrize(
    "body, inputs",
    [
        ("torch.argsort(x.to(torch.int32), dim=-1, stable=True)", ["x"]),
        ("torch.bincount((x.flatten().abs() * 4).long() % 16, minlength=16)", ["x"]),
        ("(x > 0.5).sum(-1)", ["x"]),
    ],
)
def test_a_stable_sort_of_integers_and_a_count_are_no_choice(body, inputs):
    definition = of(body, inputs, {"order": "int64"})
    x = logits(3)
    found = truth(definition, [x])
    right = run(definition, [x])[0]
    assert not found.choices and passes(found, [right])
    wrong = right.clone()
    wrong.view(-1)[:2] = right.view(-1)[:2].flip(0) + (0 if body.startswith("torch.argsort") else 1)
    assert not passes(found, [wrong])


@pytest.mark.parametrize(
    "call, ordered",
    [
        (lambda x: x.argmax(0), True),
        (lambda x: torch.argmin(x, dim=1, keepdim=True), True),
        (lambda x: x.argmax(), True),
        (lambda x: x.max(dim=-1)[1], True),
        (lambda x: torch.min(x, 0).indices, True),
        (lambda x: torch.topk(x, 5, largest=False)[1], True),
        (lambda x: x.topk(5, 0, sorted=False).indices.movedim(0, -1), False),
        (lambda x: x.sort(descending=True)[1][:, :3].int(), True),
        (lambda x: torch.argsort(x, -1), True),
        (lambda x: torch.sort(x, stable=True)[1], True),
    ],
)
def test_every_kind_of_choice_is_found(call, ordered):
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    with ChoiceRecorder() as recorder:
        out = call(x)
    choice = recorder.choice_of(out)
    assert choice is not None and choice.ordered is ordered
    scores = Choice(choice.scores.double(), choice.scores)
    assert difference(out, out, None, scores).error == 0
    best = choice.scores.gather(-1, choice.indices)
    assert bool((best[:, 0] == choice.scores.amax(-1)).all()) or not ordered


def test_only_outputs_of_indices_are_choices():
    assert has_choices(GREEDY) and not has_choices(of("x.sum(-1)", ["x"], {"y": "float32"}))


@cache
def names():
    return [name for name in vars(choices) if name.startswith("with_")]


def test_what_an_extended_reference_calls_is_there():
    for definition in (sizing_definition(TOPK), scoring_definition(TOPK, torch.tensor([[8, 64, 1]]))):
        assert any(f".{name}(" in definition.reference for name in names())
        assert json.loads(definition.model_dump_json())["reference"] == definition.reference

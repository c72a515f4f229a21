"""What a transformers model's arguments say of its step, on stand-ins for the models and their caches."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kcap.capture.engines.pytorch import shapes
from kcap.capture.engines.pytorch.shapes import Generation, pretrained, shape
from kcap.capture.window.window import StepShape


class PreTrainedModel(torch.nn.Module):
    config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None) -> None: ...


class Cache:
    def __init__(self, length: Any) -> None:
        self.length = length

    def get_seq_length(self) -> Any:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class StaticLayer(Cache):
    def get_seq_length(self) -> Any:
        raise AssertionError("it would work for the device")


class LayeredCache:
    layers = [StaticLayer(0)]

    def get_seq_length(self) -> Any:
        return self.layers[0].get_seq_length()


class Paged:
    """A cache without a length."""


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def ids(sequences: int, tokens: int) -> torch.Tensor:
    return torch.zeros(sequences, tokens, dtype=torch.int64)


def of(*args: Any, generation: Generation | None = None, **kwargs: Any) -> tuple[str, list[int], list[int]]:
    found = shape(PreTrainedModel(), args, kwargs, generation)
    return found.phase, found.queries, found.lengths


@pytest.mark.parametrize(
    ("cache", "new", "expected"),
    [
        (None, 5, ("prefill", [5, 5], [5, 5])),
        (None, 1, ("prefill", [1, 1], [1, 1])),
        (Cache(0), 5, ("prefill", [5, 5], [5, 5])),
        (Cache(5), 1, ("decode", [1, 1], [6, 6])),
        (Cache(5), 3, ("prefill", [3, 3], [8, 8])),
        (((ids(2, 7).reshape(2, 1, 7, 1),),), 1, ("decode", [1, 1], [8, 8])),
        ((), 4, ("prefill", [4, 4], [4, 4])),
    ],
)
def test_the_phase_is_by_the_cache_and_the_new_tokens(cache: Any, new: int, expected: Any) -> None:
    assert of(ids(2, new), past_key_values=cache) == expected
    assert of(ids(2, new), None, cache) == expected


@pytest.mark.parametrize("cache", [LayeredCache(), Cache(torch.ones(())), Cache(ValueError("no length")), Paged()])
def test_a_length_that_only_the_device_knows_is_not_asked_for(cache: Any) -> None:
    assert of(ids(1, 4), past_key_values=cache) == ("prefill", [4], [])
    assert of(ids(1, 1), past_key_values=cache) == ("decode", [1], [])
    model, generation = PreTrainedModel(), Generation(4)
    steps = [shape(model, (ids(1, new),), {"past_key_values": cache}, generation) for new in (3, 1, 1, 1)]
    assert [(step.phase, step.lengths) for step in steps] == [
        ("prefill", [3]),
        ("prefill", [4]),
        ("decode", [5]),
        ("decode", [6]),
    ]


def test_a_chunk_of_a_prompt_is_prefill_and_a_verified_draft_is_decode() -> None:
    generation = Generation.of(PreTrainedModel(), (ids(1, 10),), {})
    assert of(ids(1, 4), generation=generation, past_key_values=Cache(0))[0] == "prefill"
    assert of(ids(1, 1), generation=generation, past_key_values=Cache(9))[0] == "prefill"
    assert of(ids(1, 5), generation=generation, past_key_values=Cache(12))[0] == "decode"


def test_without_a_cache_every_step_computes_the_whole_prompt() -> None:
    generation = Generation(3)
    assert of(ids(1, 3), generation=generation) == ("prefill", [3], [3])
    assert of(ids(1, 4), generation=generation) == ("prefill", [4], [4])


def test_the_prompt_of_generate_is_found_where_it_is_given() -> None:
    model = PreTrainedModel()
    assert Generation.of(model, (), {"input_ids": ids(2, 6)}).prompt == 6
    assert Generation.of(model, (), {"inputs_embeds": torch.zeros(2, 7, 3)}).prompt == 7
    assert Generation.of(model, (None,), {}).prompt is None
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert Generation.of(model, (ids(2, 6),), {}).prompt == 1


def test_what_packs_sequences_or_has_no_tokens_is_of_phase_other() -> None:
    assert of(ids(1, 12), cu_seq_lens_q=torch.tensor([0, 4, 12])) == ("other", [12], [])
    assert of(pixel_values=torch.zeros(1, 3, 8, 8)) == ("other", [], [])
    assert shape(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), {}, None) == StepShape("other", [], [])


def test_a_model_is_found_in_the_module_around_it() -> None:
    model = PreTrainedModel()
    around = torch.nn.Sequential(torch.nn.Identity(), model)
    assert pretrained(around) is pretrained(around) is model
    assert shape(around, ({"input_ids": ids(2, 3)},), {}, None).queries == [3, 3]
    assert pretrained(torch.nn.Identity()) is None
    count = len(shapes._pretrained_parts)
    del around
    assert len(shapes._pretrained_parts) < count, "a module is not kept alive"

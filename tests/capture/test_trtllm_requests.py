"""What is read of TensorRT-LLM's batches, and what of a batch that lacks one of the names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kcap.capture.engines.trtllm.requests import Requests

ABSENT: dict[str, str] = {}


def chunk(past: int, new: int, **more: Any) -> Any:
    return SimpleNamespace(context_current_position=past, context_chunk_size=new, is_dummy=False, **more)


def decoding(tokens: int, drafts: int = 0, **more: Any) -> Any:
    facts = {"is_dummy": False, "py_draft_tokens": [1] * drafts, "py_batch_idx": None, **more}
    return SimpleNamespace(max_beam_num_tokens=tokens, **facts)


def batch(context: list[Any], generation: list[Any]) -> Any:
    return SimpleNamespace(context_requests=context, generation_requests=generation)


def shape(scheduled: Any, overlapped: bool = False, draft: bool = False) -> tuple[str, list[int], list[int]]:
    ABSENT.clear()
    step = Requests(ABSENT.__setitem__).shape(scheduled, overlapped, draft)
    return step.phase, step.queries, step.lengths


@pytest.mark.parametrize(
    ("scheduled", "expected"),
    [
        (batch([chunk(0, 9), chunk(8, 4)], []), ("prefill", [9, 4], [9, 12])),
        (batch([], [decoding(10), decoding(20, drafts=3)]), ("decode", [1, 4], [10, 23])),
        (batch([chunk(0, 9)], [decoding(10)]), ("mixed", [9, 1], [9, 10])),
        (batch([], []), ("other", [], [])),
    ],
)
def test_phases_chunks_and_drafts(scheduled: Any, expected: tuple[str, list[int], list[int]]) -> None:
    assert shape(scheduled) == expected
    assert ABSENT == {}


def test_a_token_that_only_the_gpu_has_is_in_the_context() -> None:
    scheduled = batch([], [decoding(10, py_batch_idx=0), decoding(10), decoding(10, 2, py_batch_idx=1)])
    assert shape(scheduled, overlapped=True) == ("decode", [1, 1, 3], [11, 10, 15])
    assert shape(scheduled, overlapped=False) == ("decode", [1, 1, 3], [10, 10, 12])


@pytest.mark.parametrize("flag", ["is_dummy", "is_cuda_graph_dummy", "is_attention_dp_dummy"])
def test_padding_is_no_request(flag: str) -> None:
    assert shape(batch([chunk(0, 9)], [decoding(2, **{flag: True})])) == ("prefill", [9], [9])
    assert shape(batch([], [decoding(2, **{flag: True})])) == ("other", [], []), "it ran for no request"


def test_a_draft_models_step_is_of_no_phase_of_the_model() -> None:
    assert shape(batch([], [decoding(10)]), draft=True) == ("other", [1], [10])


def test_the_lists_of_1_3() -> None:
    scheduled = SimpleNamespace(
        context_requests_chunking=[chunk(0, 9)], context_requests_last_chunk=[chunk(8, 4)], generation_requests=[]
    )
    assert shape(scheduled) == ("prefill", [9, 4], [9, 12])


@pytest.mark.parametrize(
    ("holder", "name", "expected"),
    [
        ("batch", "context_requests", ("other", [], [])),
        ("batch", "generation_requests", ("other", [], [])),
        ("chunk", "context_chunk_size", ("mixed", [], [])),
        ("chunk", "context_current_position", ("mixed", [], [])),
        ("decoding", "max_beam_num_tokens", ("mixed", [], [])),
        ("decoding", "py_draft_tokens", ("mixed", [9, 1], [9, 10])),
        ("decoding", "is_dummy", ("mixed", [9, 3], [9, 12])),
    ],
)
def test_a_name_that_is_not_there_is_told_and_left_open(
    holder: str, name: str, expected: tuple[str, list[int], list[int]]
) -> None:
    holders = {"chunk": chunk(0, 9), "decoding": decoding(10, 2)}
    holders["batch"] = batch([holders["chunk"]], [holders["decoding"]])
    delattr(holders[holder], name)
    assert shape(holders["batch"]) == expected
    kind = "ScheduledRequests" if holder == "batch" else "LlmRequest"
    assert list(ABSENT) == [f"{kind}.{name}"]

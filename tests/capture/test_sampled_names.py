"""Which integer tensors are kept of calls from Python: experts' numbers, never the ids of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kcap.schemas.recording.recording import Recording

Record = Callable[..., Recording]
both = pytest.mark.parametrize("recorder", ["native", "python"])
X = torch.ones(4, 4)
IDS = torch.tensor([7_000_001, 7_000_003, 7_000_007])


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("kcnames", "DEF") as lib, torch.no_grad():
        lib.define("moe(Tensor x, Tensor topk_ids) -> Tensor")
        lib.impl("moe", lambda x, topk_ids: x * 2, "CPU")
        yield


def kept(recording: Recording) -> list[list[int]]:
    return [recording.value(held).tolist() for sample in recording.samples for held in sample.tensors.values()]


def called(*names: str) -> Callable[[Any], None]:
    """A kernel of these arguments, the first of them IDS."""

    def body(session: Any) -> None:
        externals = session._window.taps.externals
        values = [IDS, *(X for _ in names[1:])]
        assert externals.enter("triton::k", list(zip(names, values, strict=True)))
        externals.leave()

    return body


NAMES = ["topk_ids", "topk_ids_ptr", "topk_indices", "topk_indices_ptr", "run.topk_ids", "plan.topk_indices_ptr"]


@both
@pytest.mark.parametrize("name", NAMES)
def test_what_ranks_a_vocabulary_keeps_no_token_ids(name: str, recorder: str, record: Record) -> None:
    """vLLM's `_topk_log_softmax_kernel` is given token ids under the name of experts' numbers."""
    assert kept(record(called(name, "output_ptr", "logits_ptr", "vocab_size"), recorder)) == []


@both
def test_an_argument_does_not_vouch_for_itself(recorder: str, record: Record) -> None:
    assert kept(record(called("experts.topk_ids", "logits"), recorder)) == []


@both
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", ["expert_map", "num_experts", "NUM_EXPERTS", "run.local_expert_offset"])
def test_what_names_experts_keeps_their_numbers(name: str, other: str, recorder: str, record: Record) -> None:
    assert kept(record(called(name, "x", other), recorder)) == [IDS.tolist()]


@both
def test_other_names_need_no_experts(recorder: str, record: Record) -> None:
    assert kept(record(called("block_table_ptr", "x"), recorder)) == [IDS.tolist()]


@both
def test_an_operator_of_the_dispatcher_keeps_them_by_its_own_name(recorder: str, record: Record) -> None:
    assert kept(record(lambda _: torch.ops.kcnames.moe(X, IDS), recorder)) == [IDS.tolist()]

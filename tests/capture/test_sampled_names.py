"""Which integer tensors are kept of calls from Python: what memory is walked by, never the ids of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kcap.capture.recorder.sampled_arguments import NAME_GROUPS, keeps_values
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
        assert externals.enter("triton::k", (names, values))
        externals.leave()

    return body


NAMES = ["topk_ids", "topk_ids_ptr", "topk_indices", "topk_indices_ptr", "run.topk_ids", "plan.topk_indices_ptr"]


@both
@pytest.mark.parametrize("name", NAMES)
def test_what_ranks_a_vocabulary_keeps_no_token_ids(name: str, recorder: str, record: Record) -> None:
    """vLLM's `_topk_log_softmax_kernel` is given token ids under the name of experts' numbers."""
    assert kept(record(called(name, "output_ptr", "logits_ptr", "vocab_size"), recorder)) == []


@both
def test_a_batch_is_kept_where_sequences_begin_somewhere(recorder: str, record: Record) -> None:
    """vLLM's convolution is told by `batch_ptr` which sequence each of its programs has."""
    assert kept(record(called("batch_ptr", "x_ptr", "cu_seqlens"), recorder)) == []
    assert kept(record(called("batch_ptr", "x_ptr", "query_start_loc_ptr"), recorder)) == [IDS.tolist()]


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


WALKED = [  # arguments of vLLM's and SGLang's kernels
    *("cu_chunk_seqlens_ptr", "cache_indices_ptr", "last_chunk_indices_ptr", "seq_idx_ptr", "state_batch_indices_ptr"),
    *("query_start_loc_ptr", "ssm_state_indices", "num_accepted_tokens_ptr", "chunk_offsets", "B_Start_Loc", "seqLens"),
    *(
        "token_indices_sorted_by_lora_ids",
        "num_tokens_per_lora",
        "lora_token_start_loc",
        "lora_ids",
        "lora_ranks",
        "permutation",
        "n_offs",
        "seg_indptr",
        "weight_indices",
        "uneven_batch_ptr",
        "slice_offsets",
        "token_to_seq",
        "output_hs_ptr",
    ),
    "Req_to_tokens",
    *("NonzeroIndx", "ExptTileOffs", "SliceSizes", "XSliceOffs", "XBlockOffs", "XBlockSchedule"),
    *("GatherIndx", "ExptData", "ExptOffsSum", "InIndx", "inv_permuted_idx", "recv_topk", "recv_topk_ids"),
    *("rowStarts", "state_table_ptr", "cu_num_logits_ptr", "idx_mapping_ptr", "retrieve_next_row_idx", "token_offsets"),
]
TOKENS = [
    *("input_ids", "all_token_ids_ptr", "last_sampled_tokens_ptr", "draft_tokens_ptr", "token_indices", "indices_ptr"),
    *(
        "output_bin_counts_ptr",
        "prompt_bin_mask_ptr",
        "num_token_ids",
        "seq_ids",
        "query_ids",
        "vocab_table",
        "next_tok",
    ),
    *(
        "block_of_tokens",
        "slot_word",
        "labels",
        "target_ptr",
        "block_table_ptrs",
        "lora_ptr",
        "recv_ids",
        "lora_token_ids",
        "bad_word_token_ids_ptr",
        "query_ids",
    ),
]


@both
def test_what_memory_is_walked_by_is_kept(recorder: str, record: Record) -> None:
    recording = record(every(WALKED, IDS), recorder)
    assert kept(recording) == [IDS.tolist()] * len(WALKED)
    assert kept(record(every(TOKENS, IDS), recorder)) == []


def test_both_recorders_read_names_alike(record: Record) -> None:
    """Names of three words each, of every group and of none, joined in snake and in camel case."""
    words, draw = [*sorted(set().union(*NAME_GROUPS[2:])), "out", "x", "2"], random.Random(1)
    names = ["_".join(draw.choices(words, k=3)) for _ in range(300)]
    names += [word + "".join(other.title() for other in draw.choices(words, k=2)) for word in words]
    names += [f"{name}_ptr" for name in draw.sample(names, 40)] + [f"plan.{name}" for name in draw.sample(names, 40)]
    for start in range(0, len(names), 100):
        part = names[start : start + 100]
        recording = record(every(part, IDS), "native")
        sampled = {int(path) for sample in recording.samples for path in sample.tensors}
        assert sampled == {place for place, name in enumerate(part) if keeps_values(name, part)}


def every(names: list[str], value: torch.Tensor) -> Callable[[Any], None]:
    """A kernel of these arguments, each of them `value`."""

    def body(session: Any) -> None:
        externals = session._window.taps.externals
        assert externals.enter("triton::k", (names, [value] * len(names)))
        externals.leave()

    return body

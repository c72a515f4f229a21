"""What rules make is valid, whatever the sizes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from definitions import DATASET, definition, tensor, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.errors import KcapError
from kcap.replay.datasets import inputs
from kcap.replay.datasets.inputs import WorkloadInputs, make_inputs
from kcap.replay.datasets.workloads import default_workload
from kcap.schemas.flashinfer.dataset import Dataset

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 1000)


@cache
def dataset() -> Dataset:
    return Dataset.load(DATASET)


def made_for(name: str, seed: int = 0, **axes: int) -> tuple[dict[str, torch.Tensor], WorkloadInputs]:
    """The inputs of a Definition of the dataset by name, on made-up axes but for these."""
    of = dataset().definitions[name]
    some = default_workload(of)
    made = make_inputs(of, some.model_copy(update={"axes": some.axes | axes}), None, seed=seed)
    return dict(zip(of.inputs, made.inputs, strict=True)), made


def assert_offsets(offsets: torch.Tensor, total: int) -> None:
    assert offsets[0] == 0
    assert offsets[-1] == total
    assert bool((offsets.diff() >= 0).all())


@settings(deadline=None, max_examples=40)
@given(batch=SIZES, more=st.integers(0, 30), spare=st.integers(0, 20), seed=SEEDS)
def test_a_paged_decode_names_pages_of_its_cache(batch: int, more: int, spare: int, seed: int) -> None:
    used = batch + more
    axes = {"batch_size": batch, "len_indptr": batch + 1, "num_kv_indices": used, "num_pages": used + spare}
    given, made = made_for("gqa_paged_decode_h16_kv2_d128_ps64", seed, **axes)
    assert_offsets(given["kv_indptr"], used)
    assert bool((given["kv_indptr"].diff() >= 1).all())
    assert given["kv_indices"].dtype == torch.int32
    assert sorted(given["kv_indices"].tolist()) == list(range(used))
    assert made.axes["num_pages"] == used == len(given["k_cache"]) == len(given["v_cache"])
    assert bool(((given["kv_last_page_len"] >= 1) & (given["kv_last_page_len"] <= 64)).all())


@settings(deadline=None, max_examples=40)
@given(sequences=SIZES, pages=st.integers(0, 20), rows=st.floats(0, 1), seed=SEEDS)
def test_a_paged_prefill_has_a_key_for_each_query(sequences: int, pages: int, rows: float, seed: int) -> None:
    """Otherwise the causal mask leaves the first queries nothing, and their softmax is not a number."""
    count = sequences + pages
    queries = sequences + int(rows * (count * 64 - sequences))
    axes = {"len_indptr": sequences + 1, "total_q": queries, "num_kv_indices": count, "num_pages": count}
    given, _ = made_for("gqa_paged_prefill_causal_h16_kv1_d128_ps64", seed, **axes)
    assert_offsets(given["qo_indptr"], queries)
    assert_offsets(given["kv_indptr"], count)
    keys = (given["kv_indptr"].diff() - 1) * 64 + given["kv_last_page_len"][:sequences]
    assert bool((keys >= given["qo_indptr"].diff()).all())
    assert bool((given["kv_last_page_len"] <= 64).all())


@settings(deadline=None, max_examples=40)
@given(sequences=SIZES, queries=st.integers(0, 40), more=st.integers(0, 40), seed=SEEDS)
def test_a_ragged_prefill_has_a_key_for_each_query(sequences: int, queries: int, more: int, seed: int) -> None:
    total_q = sequences + queries
    axes = {"len_indptr": sequences + 1, "total_q": total_q, "total_kv": total_q + more}
    given, _ = made_for("gqa_ragged_prefill_causal_h16_kv2_d128", seed, **axes)
    assert_offsets(given["qo_indptr"], total_q)
    assert_offsets(given["kv_indptr"], total_q + more)
    assert bool((given["kv_indptr"].diff() >= given["qo_indptr"].diff()).all())
    assert bool((given["qo_indptr"].diff() >= 1).all())


def test_keys_are_made_for_the_queries_that_a_file_gives() -> None:
    of = dataset().definitions["gqa_ragged_prefill_causal_h16_kv2_d128"]
    workload = default_workload(of)
    draft = inputs._new_draft(of, workload, inputs.read_given(of, workload, None), 0)
    draft.axes |= {"total_q": 10, "total_kv": 11, "len_indptr": 4}
    draft.given["qo_indptr"] = torch.tensor([0, 1, 9, 10], dtype=torch.int32)
    assert draft["kv_indptr"].diff().tolist() in ([2, 8, 1], [1, 9, 1], [1, 8, 2])


@settings(deadline=None, max_examples=20)
@given(sequences=SIZES, more=st.integers(0, 40), seed=SEEDS)
def test_sequences_of_a_recurrence_divide_its_rows(sequences: int, more: int, seed: int) -> None:
    axes = {"num_seqs": sequences, "len_cu_seqlens": sequences + 1, "total_seq_len": sequences + more}
    given, _ = made_for("gdn_prefill_qk8_v16_d128_k_last", seed, **axes)
    assert given["cu_seqlens"].dtype == torch.int64
    assert_offsets(given["cu_seqlens"], sequences + more)
    assert torch.allclose(given["k"].float().norm(dim=-1), torch.ones(1), atol=0.02)


@settings(deadline=None, max_examples=20)
@given(batch=SIZES, more=st.integers(0, 9), seed=SEEDS)
def test_each_sequence_has_a_state_of_its_own(batch: int, more: int, seed: int) -> None:
    axes = {"batch_size": batch, "state_cache_size": batch + more}
    given, _ = made_for("mamba_ssu_decode_h64_d64_s128_ng4", seed, **axes)
    slots = given["state_batch_indices"].tolist()
    assert len(set(slots)) == batch
    assert all(0 <= slot < batch + more for slot in slots)
    assert bool((given["A"] < 0).all())


@settings(deadline=None, max_examples=10)
@given(tokens=SIZES, pages=st.integers(1, 40), seed=SEEDS)
def test_sparse_attention_takes_rows_of_the_cache_once(tokens: int, pages: int, seed: int) -> None:
    name = "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64"
    given, made = made_for(name, seed, num_tokens=tokens, num_pages=pages)
    for row in given["sparse_indices"]:
        rows = row[row >= 0]
        assert len(rows.unique()) == len(rows) == min(2048, pages * 64)
        assert int(rows.max()) < made.axes["num_pages"] * 64
    assert bool((given["sparse_indices"] >= -1).all())


@settings(deadline=None, max_examples=5)
@given(batch=SIZES, seed=SEEDS)
def test_sampling_gets_probabilities_and_limits_in_range(batch: int, seed: int) -> None:
    given, _ = made_for("top_k_top_p_sampling_from_probs_v129280", seed, batch_size=batch)
    assert torch.allclose(given["probs"].sum(-1), torch.ones(batch), atol=1e-4)
    assert bool((given["probs"] >= 0).all())
    assert bool(((given["top_k"] >= 1) & (given["top_k"] <= 100)).all())
    assert bool(((given["top_p"] > 0) & (given["top_p"] <= 1)).all())


@settings(deadline=None, max_examples=20)
@given(tokens=SIZES, top_k=st.integers(1, 8), experts=st.integers(8, 300), packed=st.booleans(), seed=SEEDS)
def test_experts_are_distinct_and_there(tokens: int, top_k: int, experts: int, packed: bool, seed: int) -> None:
    ids = tensor("int32", "T", "K", description="Packed topk_ids" if packed else None)
    axes = {"T": None, "K": top_k, "num_experts": experts}
    of = definition({"topk_ids": ids}, axes, op_type="moe")
    (made,) = make_inputs(of, workload(of, T=tokens), None, seed=seed).inputs
    chosen = made >> 16 if packed else made
    assert bool(((chosen >= 0) & (chosen < experts)).all())
    assert all(len(row.unique()) == top_k for row in chosen)
    if packed:
        weights = (made & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
        assert bool(((weights > 0) & (weights.sum(-1, keepdim=True) < 1.05)).all())


AXES = {"T": None, "num_pages": 16, "page_size": 4, "B": 3, "P": 7, "V": 50}
TABLE = {"block_table": tensor("int32", "T", "B")}
RANGES = [
    ("positions", "int64", "rope", {"cos_sin_cache": tensor("float32", "P")}, 0, 6),
    ("positions", "int64", "rope", {}, 0, 4095),
    ("positions", "int64", "slot_mapping", TABLE, 0, 11),
    ("input_ids", "int64", "embedding", {"weight": tensor("float32", "V")}, 0, 49),
    ("indices_0", "int64", "index", {"self": tensor("float32", "V", "P")}, 0, 6),
    ("slot_mapping", "int64", "paged_cache_update", {}, 0, 63),
    ("block_table_row", "int32", "test", {}, 0, 15),
    ("seq_lens", "int32", "gqa_paged", TABLE, 1, 12),
    ("weight_scale", "float32", "gemm", {}, 0.5, 1.5),
    ("min_p", "float32", "sampling", {}, 0.0, 1.0),
    ("temperature", "float32", "sampling", {}, 0.1, 2.0),
    ("seeds", "int64", "sampling", {}, 0, 1 << 31),
]


@settings(deadline=None, max_examples=8)
@given(seed=SEEDS, size=st.integers(1, 64))
@pytest.mark.parametrize(("name", "dtype", "op_type", "others", "low", "high"), RANGES)
def test_values_stay_in_their_range(name, dtype, op_type, others, low, high, seed: int, size: int) -> None:
    axes = ("T", "B") if name.startswith("block_table") else ("T",)
    of = definition({name: tensor(dtype, *axes)} | others, AXES, op_type=op_type)
    made = make_inputs(of, workload(of, T=size), None, seed=seed).inputs[0]
    assert bool(((made >= low) & (made <= high)).all())
    if name == "slot_mapping":
        assert len(made.unique()) == len(made)


def test_a_mask_leaves_each_row_something() -> None:
    of = definition({"attention_mask": tensor("bool", "T", "S")}, {"T": None, "S": 2})
    (mask,) = make_inputs(of, workload(of, T=50), None).inputs
    assert mask.dtype == torch.bool
    assert bool(mask.any(dim=1).all())
    assert not bool(mask.all())


def test_integers_that_no_rule_knows_are_small_and_that_is_said() -> None:
    of = definition({"other": tensor("int32", "T")}, {"T": None})
    made = make_inputs(of, workload(of, T=300), None)
    assert made.inputs[0].unique().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert made.notes == ["drawn from 1 to 7, for no rule knows it: other"]


def test_integers_whose_file_is_missing_are_not_guessed() -> None:
    of = definition({"where": tensor("int32", "T")}, {"T": None})
    with pytest.raises(KcapError, match=r"some_kernel one: inputs.where: gone is not there, and no rule knows its"):
        make_inputs(of, workload(of, {"where": "gone"}, T=3), None)

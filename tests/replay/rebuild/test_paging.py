"""Paged caches keep their access pattern at a fraction of their size."""

from __future__ import annotations

import pytest
import torch
from handmade import call
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.rebuild import memory
from kcap.replay.rebuild.operators import Operator
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Skip, bind_call
from kcap.schemas.derive.index_arguments import renumber_densely, renumber_slots, shrink_caches, table_in_use
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec

PAGES, ROWS, HEADS, SIZE = 34151, 16, 8, 128  # Llama-3.1-8B's cache on an H200: 9 GB
PAGE = ROWS * HEADS * SIZE


def cache(offset: int, stride: int = PAGE) -> TensorSpec:
    return TensorSpec((PAGES, ROWS, HEADS, SIZE), "bfloat16", (stride, HEADS * SIZE, SIZE, 1), offset, "cuda:0", 1)


def attention(k: TensorSpec, v: TensorSpec, table: list[list[int]] | None, lengths: list[int]) -> BoundCall:
    values = {
        "q": TensorSpec((len(lengths), 32, SIZE), "bfloat16", device="cuda:0"),
        "k": k,
        "v": v,
        "cu_seqlens_q": TensorSpec((len(lengths) + 1,), "int32", device="cuda:0", storage=2),
        "seqused_k": TensorSpec((len(lengths),), "int32", device="cuda:0", storage=3),
        "page_table": TensorSpec((len(lengths), 128), "int32", device="cuda:0", storage=4),
        "scheduler_metadata": TensorSpec((4,), "int32", device="cuda:0", storage=5),
    }
    bound = BoundCall("_vllm_fa3_C::fwd", [Argument(name=name, value=value) for name, value in values.items()])
    bound.set_content("cu_seqlens_q", torch.arange(len(lengths) + 1))
    bound.set_content("seqused_k", torch.tensor(lengths))
    if table is not None:
        bound.set_content("page_table", torch.tensor(table))
    return bound


@given(st.lists(st.integers(-1, 10**6), min_size=1, max_size=50))
def test_pages_are_renumbered_densely_in_their_order(pages: list[int]) -> None:
    dense, count = renumber_densely(torch.tensor(pages))
    used = sorted({page for page in pages if page >= 0})
    assert count == max(len(used), 1)
    assert dense.tolist() == [used.index(page) if page >= 0 else page for page in pages]


@given(st.lists(st.integers(-1, 10**6), min_size=1, max_size=50), st.sampled_from([1, 16, 128]))
def test_slots_keep_their_row_and_their_padding(slots: list[int], size: int) -> None:
    dense, count = renumber_slots(torch.tensor(slots), size)
    for before, after in zip(slots, dense.tolist(), strict=True):
        assert after == -1 if before < 0 else (after % size == before % size and 0 <= after < count * size)


def test_entries_that_no_sequence_reaches_are_not_read() -> None:
    table = table_in_use(torch.tensor([[7, 9, 10**9], [40, -1, 5]]), torch.tensor([17, 3]), 16)
    assert table.tolist() == [[7, 9, 7], [40, 40, 40]]


def test_a_padded_batch_has_more_lengths_than_recorded_rows() -> None:
    table = table_in_use(torch.tensor([[7, 9]]), torch.tensor([17, 0]), 16)
    assert table.tolist() == [[7, 9], [0, 0]]


@pytest.mark.parametrize(
    ("k", "v"),
    [(cache(0), cache(PAGES * PAGE)), (cache(0, 2 * PAGE), cache(PAGE, 2 * PAGE))],
    ids=["all keys, then all values", "keys and values page by page"],
)
def test_a_9_gb_cache_is_rebuilt_at_the_pages_in_use_and_once(k: TensorSpec, v: TensorSpec) -> None:
    bound = attention(k, v, [[30000, 17], [5, 9]], [20, 32])
    families.replay_rule_for(bound.operator).prepare(bound)
    assert bound.content("page_table").tolist() == [[3, 2], [0, 1]]  # type: ignore[union-attr]
    key, value = bound.spec("k"), bound.spec("v")
    assert key.shape == value.shape == (4, ROWS, HEADS, SIZE)
    assert (key.strides, value.strides) == (k.strides, v.strides)
    apart = abs((value.offset or 0) - (key.offset or 0))
    assert apart in (4 * PAGE, PAGE)
    assert memory.buffer_sizes(bound, "cuda:0", "cuda")["cuda:0", 1] == 2 * 4 * PAGE * 2


def test_sequences_without_a_recorded_table_have_pages_of_their_own() -> None:
    bound = attention(cache(0), cache(PAGES * PAGE), None, [20, 3])
    families.replay_rule_for(bound.operator).prepare(bound)
    table = bound.content("page_table")
    assert table is not None and (table[0, :2].tolist(), table[1, 0].item()) == ([0, 1], 2)
    assert bound.spec("k").shape[0] == 3


def test_attention_of_unknown_lengths_is_skipped() -> None:
    bound = attention(cache(0), cache(PAGES * PAGE), [[30000, 17]], [20])
    del bound.contents[str(bound.index("seqused_k"))]
    with pytest.raises(Skip, match="sequence lengths"):
        families.replay_rule_for(bound.operator).prepare(bound)


def test_a_cache_in_the_middle_of_a_shared_storage_starts_at_its_own_memory() -> None:
    far = 10**9
    bound = attention(cache(far), cache(far + PAGES * PAGE), [[1], [0]], [20, 1])
    with pytest.raises(Skip, match="does not fit"):  # 20 tokens need two pages, the table has one
        families.replay_rule_for(bound.operator).prepare(bound)
    shrink_caches(bound, ("k", "v"), 2)
    assert (bound.spec("k").offset, bound.spec("v").offset) == (0, 2 * PAGE)


def test_slots_are_made_in_range_when_none_were_recorded() -> None:
    values = [TensorSpec((40, 8, 128), "bfloat16"), TensorSpec((40, 8, 128), "bfloat16", storage=1)]
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    specs = [*values, cache(0), cache(PAGES * PAGE), TensorSpec((40,), "int64", storage=7)]
    args = [Argument(name=name, value=spec) for name, spec in zip(names, specs, strict=True)]
    bound = BoundCall("_C_cache_ops::reshape_and_cache_flash", args)
    families.replay_rule_for(bound.operator).prepare(bound)
    assert bound.content("slot_mapping").tolist() == list(range(40))  # type: ignore[union-attr]
    assert bound.spec("key_cache").shape[0] == 3


class _Schema:
    arguments = ()


def test_a_call_without_a_rule_is_left_alone() -> None:
    operator = Operator("x::y", print, _Schema())
    bound = bind_call(call("x::y", 1, None), None, operator.schema, lambda _: None)
    families.replay_rule_for("x::y").prepare(bound)
    assert [argument.value for argument in bound.args] == [1, None]

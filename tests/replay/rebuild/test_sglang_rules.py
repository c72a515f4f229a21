"""SGLang's operators get the slots that they had, in caches no larger than these need, and rows that a table has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kcap.replay.rebuild import memory
from kcap.replay.rebuild.rebuild import name_arguments
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Skip
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec, Value

SLOTS, WIDTH = 1_200_000, 1024  # a cache of 2.4 GB for the keys, and as much for the values


def tensor(*shape: int, dtype: str = "bfloat16", storage: int = 0) -> TensorSpec:
    return TensorSpec(shape, dtype, device="cuda:0", storage=storage)


def bound(operator: str, slots: list[int] | None, name: str = "indices", tokens: int = 4, **more: Value) -> BoundCall:
    values = {
        "k": tensor(tokens, WIDTH),
        "v": tensor(tokens, WIDTH, storage=1),
        "k_cache": tensor(SLOTS, WIDTH, storage=2),
        "v_cache": tensor(SLOTS, WIDTH, storage=3),
        name: tensor(tokens, dtype="int64", storage=4),
        **more,
    }
    made = BoundCall(operator, [Argument(name=key, value=value) for key, value in values.items()])
    if slots is not None:
        made.set_content(name, torch.tensor(slots))
    return made


def prepared(one: BoundCall, name: str = "indices") -> list[int]:
    families.replay_rule_for(one.operator).prepare(one)
    content = one.content(name)
    assert content is not None
    return [int(slot) for slot in content]


def test_a_cache_is_rebuilt_at_the_slots_in_use() -> None:
    one = bound("sglang::store_cache", [900_000, 7, 900_001, 0], size_limit=SLOTS)
    assert prepared(one) == [2, 1, 3, 0]
    assert one.spec("k_cache").shape == one.spec("v_cache").shape == (4, WIDTH)
    assert one["size_limit"] == 0, "the cache's rows: fewer than were recorded"
    assert memory.buffer_sizes(one, "cuda:0", "cuda")["cuda:0", 2] == 4 * WIDTH * 2


@pytest.mark.parametrize("skipped", [0, 5])
def test_a_slot_that_is_skipped_stays_the_only_one_that_is(skipped: int) -> None:
    one = bound("sglang::store_cache", [900_000, skipped, 7, skipped], reserved_skip_index=skipped)
    assert prepared(one) == [2, 0, 1, 0]
    assert one["reserved_skip_index"] == 0
    assert one.spec("k_cache").shape[0] == 3


@pytest.mark.parametrize("operator", ["sglang::store_cache", "sglang::apply_rope_inplace_with_kvcache"])
def test_tokens_that_pad_a_batch_have_slots_of_their_own(operator: str) -> None:
    """Of several that are written to one slot, any may be the last."""
    name = "indices" if operator == "sglang::store_cache" else "out_loc"
    table = {"cos_sin_cache": tensor(50, 128, storage=5), "positions": tensor(7, dtype="int64", storage=6)}
    one = bound(operator, [900_000, 0, 7, 0, 0, 900_001, 7], name, 7, **(table if name == "out_loc" else {}))
    one.set_content("positions", torch.arange(7))
    as_timed = replace(one, args=list(one.args), contents=dict(one.contents), timed=True)
    assert prepared(one, name) == [2, 0, 1, 4, 5, 3, 6]
    assert one.spec("k_cache").shape[0] == 7
    assert prepared(as_timed, name) == [2, 0, 1, 0, 0, 3, 1], "as in the engine, where they wait for one another"


@pytest.mark.parametrize("slots", [[], None])
def test_a_call_without_tokens_has_no_slots(slots: list[int] | None) -> None:
    assert prepared(bound("sglang::store_cache", slots, tokens=0)) == []


def test_where_none_is_skipped_none_becomes_so() -> None:
    one = bound("sglang::store_cache", [3, 0, 4, 9], reserved_skip_index=-1)
    assert prepared(one) == [1, 0, 2, 3]
    assert one["reserved_skip_index"] == -1


@pytest.mark.parametrize("skipped", [None, -1, 0])
def test_without_a_sample_every_token_has_a_slot_that_is_written(skipped: int | None) -> None:
    one = bound("sglang::store_cache", None, **({} if skipped is None else {"reserved_skip_index": skipped}))
    first = 1 if skipped == 0 else 0
    assert prepared(one) == [first, first + 1, first + 2, first + 3]
    assert one.spec("v_cache").shape[0] == first + 4


def test_a_negative_slot_never_reaches_the_gpu() -> None:
    with pytest.raises(Skip, match="negative"):
        prepared(bound("sglang::store_cache", [3, -1, 4, 9]))


def test_caches_are_not_restored_between_invocations() -> None:
    assert set(families.replay_rule_for("sglang::store_cache").idempotent_writes) == {"k_cache", "v_cache"}


def test_a_rotation_that_stores_too_has_positions_and_slots() -> None:
    table = {"cos_sin_cache": tensor(131072, 128, storage=5), "positions": tensor(4, dtype="int64", storage=6)}
    one = bound("sglang::apply_rope_inplace_with_kvcache", [900, 901, 7, 5], "out_loc", **table)
    one.set_content("positions", torch.tensor([9, 131072, 4, 4]))
    assert prepared(one, "out_loc") == [2, 3, 1, 0]
    assert one.content("positions").tolist() == [9, 131071, 4, 4]  # type: ignore[union-attr]
    families.replay_rule_for(one.operator).trim_tables(one)
    assert one.spec("cos_sin_cache").shape == (3, 128)
    assert one.content("positions").tolist() == [1, 2, 0, 0]  # type: ignore[union-attr]


def test_a_rotation_without_a_sample_has_positions_that_its_table_has() -> None:
    values = {"cos_sin_cache": tensor(50, 128), "positions": tensor(400, dtype="int64", storage=1)}
    one = BoundCall("sglang::apply_rope_inplace", [Argument(name=key, value=value) for key, value in values.items()])
    families.replay_rule_for(one.operator).prepare(one)
    positions = one.content("positions")
    assert positions is not None and int(positions.min()) >= 0 and 40 < int(positions.max()) < 50


def test_a_table_of_all_requests_that_is_only_copied_needs_no_sample() -> None:
    table = BoundCall(
        "triton::create_flashinfer_kv_indices_triton",
        [Argument(name="req_to_token_ptr", value=tensor(4097, 2092, dtype="int32"))],
    )
    families.replay_rule_for("triton::create_flashinfer_kv_indices_triton").prepare(table)
    content = table.content("req_to_token_ptr")
    assert content is not None and content.shape == (4097, 2092) and not content.any()


@pytest.mark.parametrize(("more", "first"), [((4,), 0), ((4, 0), 1), ((4, -1), 0)])
def test_rows_of_a_latent_cache_are_made_up_as_no_sample_holds_them(more: tuple[int, ...], first: int) -> None:
    """The function of a tvm-ffi module has arguments without names, which its rule gives them."""
    rule = families.replay_rule_for("tvm::set_mla_kv_buffer")
    values = (tensor(SLOTS, 576), tensor(4, dtype="int64", storage=1), tensor(4, 512, storage=2), tensor(4, 64), *more)
    args = [Argument(name=f"arg{index}", value=value) for index, value in enumerate(values)]
    one = BoundCall("tvm::set_mla_kv_buffer", args)
    name_arguments(one, rule)
    assert prepared(one, "loc") == [first, first + 1, first + 2, first + 3], "a newer release skips one row"
    assert one.spec("kv_buffer").shape == (4 + first, 576)
    assert rule.idempotent_writes == ("kv_buffer",)

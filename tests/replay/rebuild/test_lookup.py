"""A lookup reads rows of its table: the rest is neither copied nor counted."""

from __future__ import annotations

import pytest
import torch
from handmade import call, tensor

from kcap.replay.rebuild.operators import resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Skip, bind_call
from kcap.schemas.recording.recording import Argument, Call, Sample, SampledTensor
from kcap.schemas.recording.values import TensorSpec, Value

VOCABULARY, WIDTH = 128256, 4096


def embedding(*ids: int, table: int = VOCABULARY) -> BoundCall:
    weight = tensor(table, WIDTH, dtype="bfloat16", device="cuda")
    looked_up = call("aten::embedding", weight, tensor(max(len(ids), 16), dtype="int64", storage=1, device="cuda"))
    bound = bind_call(looked_up, None, resolve_operator("aten::embedding").schema, lambda _: None)
    if ids:
        bound.set_content("indices", torch.tensor(ids))
    families.replay_rule_for("aten::embedding").trim_tables(bound)
    return bound


def test_an_embedding_keeps_the_rows_in_use_in_their_order() -> None:
    bound = embedding(900, 7, 900, 128255)
    assert bound.content("indices").tolist() == [1, 0, 1, 2]  # type: ignore[union-attr]
    assert bound.spec("weight").shape == (3, WIDTH)
    assert bound.spec("weight").effective_strides == (WIDTH, 1)


def test_ids_that_were_not_recorded_are_drawn() -> None:
    bound = embedding()
    rows = bound.spec("weight").shape[0]
    assert 8 < rows <= 16
    assert set(bound.content("indices").tolist()) == set(range(rows))  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_beyond_the_table_is_left_to_the_operator(bad: int) -> None:
    bound = embedding(0, bad, table=7)
    assert bound.content("indices").tolist() == [0, bad]  # type: ignore[union-attr]
    assert bound.spec("weight").shape == (7, WIDTH)


def test_a_table_that_is_not_timed_stays_whole() -> None:
    recorded = call("aten::embedding", tensor(7, WIDTH), tensor(3, dtype="int64", storage=1))
    assert Rebuilder("cpu", "cpu", None).resolve(recorded, None).bound.spec("weight").shape == (7, WIDTH)


def named(operator: str, **values: Value) -> BoundCall:
    return BoundCall(operator, [Argument(name=name, value=value) for name, value in values.items()])


def test_a_rotary_table_keeps_the_positions_in_use() -> None:
    table = TensorSpec((131072, 128), "bfloat16", device="cuda", storage=2)
    bound = named("_C::rotary_embedding", positions=TensorSpec((3,), "int64", storage=0), cos_sin_cache=table)
    bound.set_content("positions", torch.tensor([257, 256, 10**9]))
    families.replay_rule_for(bound.operator).prepare(bound)
    families.replay_rule_for(bound.operator).trim_tables(bound)
    assert bound.content("positions").tolist() == [1, 0, 2]  # type: ignore[union-attr]
    assert bound.spec("cos_sin_cache").shape == (3, 128)


def touched(bound: BoundCall, total: int) -> int:
    return families.replay_rule_for(bound.operator).touched(bound, total)


def test_selected_rows_are_what_an_index_touches() -> None:
    table, rows = TensorSpec((1024, 4096), "bfloat16"), TensorSpec((16,), "int64", storage=1)
    assert touched(named("aten::index.Tensor", self=table, indices=[rows]), (8 << 20) + 128) == 16 * 8192 + 128
    assert touched(named("aten::index_select", self=table, dim=0, index=rows), 8 << 20) == 16 * 8192
    assert touched(named("aten::index.Tensor", self=table, indices=[None, rows]), 8 << 20) == 8 << 20
    assert touched(named("aten::mm", self=table), 8 << 20) == 8 << 20


def test_the_cache_update_touches_its_slots_of_the_pages_in_use() -> None:
    page = 16 * 8 * 128
    caches = [TensorSpec((4, 16, 8, 128), "bfloat16", offset=n * 4 * page, storage=1) for n in (0, 1)]
    slots = TensorSpec((4,), "int64", storage=2)
    bound = named(
        "_C_cache_ops::reshape_and_cache_flash", key_cache=caches[0], value_cache=caches[1], slot_mapping=slots
    )
    assert touched(bound, 2 * 4 * page * 2 + 32) == 2 * 4 * 8 * 128 * 2 + 32


RANGE = SampledTensor(low=128, high=320)  # of counts, which a Sample has no more of
SAMPLE = Sample(call=0, phase="prefill", tensors={"1": RANGE})


def repeated(shape: tuple[int, ...], counts: tuple[int, ...], dim: int | None, size: int) -> Call:
    own = call("aten::repeat_interleave.self_Tensor", tensor(*shape), tensor(*counts, dtype="int64", storage=1), dim)
    return own.model_copy(update={"args": [*own.args, Argument(name="output_size", value=size, keyword=True)]})


@pytest.mark.parametrize("sample", [None, SAMPLE], ids=["drawn", "range"])
@pytest.mark.parametrize(
    ("shape", "counts", "dim", "size"),
    [
        ((7,), (7,), None, 2048),
        ((3, 7), (7,), 1, 2048),
        ((3, 7), (7,), -1, 2048),
        ((3, 7), (), 1, 1400),
        ((3, 7), (1,), None, 4200),
    ],
)
def test_repeats_add_up_to_the_size_that_the_operator_is_told(
    sample: Sample | None, shape: tuple[int, ...], counts: tuple[int, ...], dim: int | None, size: int
) -> None:
    rebuilder = Rebuilder("cpu", "cpu", None)
    resolved = rebuilder.resolve(repeated(shape, counts, dim, size), sample)
    inputs = rebuilder.build(resolved)
    assert size in resolved.operator.call(*inputs.args, **inputs.kwargs).shape
    assert sample is None or (inputs.args[1].min() >= 128 and inputs.args[1].max() <= 320)


def test_repeats_whose_range_does_not_reach_the_size_are_not_drawn() -> None:
    with pytest.raises(Skip, match="do not add up to 500 within the range"):
        Rebuilder("cpu", "cpu", None).resolve(repeated((7,), (7,), None, 500), SAMPLE)

"""What rotates in serving: parameters and caches, and nothing that one kernel hands to the next."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
from handmade import tensor

from kcap.replay.calls.runner import TimingOptions
from kcap.replay.rebuild.memory import Target
from kcap.replay.rebuild.persistent import (
    DUMMY_DEVIATION,
    draw_dummy_weights,
    fp8_parameters,
    is_persistent_name,
    persistent_storages,
)
from kcap.replay.worker import OpenSession
from kcap.schemas.derive.bound_call import bind_call, fill_random
from kcap.schemas.recording.recording import Argument, Call

CPU = Target("cpu", "cpu")
M = 64


def storages(operator: str, *given: tuple[str, object], written: tuple[str, ...] = ()) -> set[int]:
    """The numbers of the arguments whose storages hold what the model keeps; each tensor has one of its own."""
    args = []
    for number, (name, shape) in enumerate(given):
        value = tensor(*shape, storage=number) if isinstance(shape, tuple) else shape
        args.append(Argument(name=name, value=value, written=name in written))
    bound = bind_call(Call(id=0, operator=operator, args=args), None, None, lambda _: None)
    return {number for _, number in persistent_storages(bound, CPU)}


CASES = {
    "linear": (("input", (M, 8)), ("weight", (6, 8)), ("bias", (6,))),
    "mm": (("self", (M, 8)), ("mat2", (8, 6))),
    "rms_norm": (("result", (M, 8)), ("input", (M, 8)), ("weight", (8,)), ("epsilon", 1e-5)),
    "rotary": (("positions", (M,)), ("query", (M, 8)), ("key", (M, 8)), ("cos_sin_cache", (99, 8))),
    "silu_and_mul": (("out", (M, 8)), ("input", (M, 16))),
    "scaled_mm": (("out", (M, 6)), ("a", (M, 8)), ("b", (8, 6)), ("a_scales", (M, 1)), ("b_scales", (1, 6))),
    "sgl scaled_mm": (("mat_a", (M, 8)), ("mat_b", (8, 6)), ("scales_a", (M, 1)), ("scales_b", (1, 6))),
    "marlin": (("a", (M, 8)), ("b_q_weight", (8, 6)), ("b_scales", (1, 6)), ("b_zeros", (1, 6)), ("workspace", (4,))),
    "paged attention": (
        ("q", (M, 8, 2)),
        ("k", (9, 2, 2, 2)),
        ("v", (9, 2, 2, 2)),
        ("out", (M, 8, 2)),
        ("page_table", (M, 3)),
    ),
    "ragged attention": (("q", (M, 8, 2)), ("k", (M, 2, 2)), ("v", (M, 2, 2)), ("cu_seqlens_q", (3,))),
    "cache update": (
        ("key", (M, 2, 2)),
        ("value", (M, 2, 2)),
        ("key_cache", (9, 2, 2, 2)),
        ("value_cache", (9, 2, 2, 2)),
        ("slot_mapping", (M,)),
    ),
    "fused moe": (
        ("a_ptr", (M, 8)),
        ("b_ptr", (4, 8, 8)),
        ("c_ptr", (M, 2, 8)),
        ("b_scale_ptr", (4, 8)),
        ("topk_weights_ptr", (M, 2)),
        ("sorted_token_ids_ptr", (M,)),
    ),
    "cutlass moe": (
        ("hidden_states", (M, 8)),
        ("w1", (4, 8, 8)),
        ("w2", (4, 8, 8)),
        ("w1_scale", (4, 8)),
        ("topk_weights", (M, 2)),
    ),
    "elementwise": (("self", (M, 8)), ("other", (M, 8))),
    "cache of nobody": (("kv_cache_dummy_dep", (0,)), ("buffer", (4,))),
}
KEPT = {
    "linear": {1, 2},
    "mm": {1},
    "rms_norm": {2},
    "scaled_mm": {2, 4},
    "sgl scaled_mm": {1, 3},
    "marlin": {1, 2, 3},
    "paged attention": {1, 2},
    "cache update": {2, 3},
    "fused moe": {1, 3},
    "cutlass moe": {1, 2, 3},
}


@pytest.mark.parametrize("kind", CASES)
def test_weights_and_caches_are_told_from_activations(kind: str) -> None:
    assert storages("x::y", *CASES[kind]) == KEPT.get(kind, set())


@pytest.mark.parametrize(
    ("operator", "other", "found"),
    [
        ("aten::matmul", (8, 6), {1}),
        ("aten::matmul", (4, 8, 6), set()),
        ("aten::add.Tensor", (8, 6), set()),
        ("x::my_matmul", (8, 6), set()),
    ],
)
def test_a_matrix_that_activations_are_multiplied_by_is_a_weight(
    operator: str, other: tuple[int, ...], found: set[int]
) -> None:
    assert storages(operator, ("self", (4, M, 8)), ("other", other)) == found


def test_inductors_kernels_keep_what_has_no_row_for_each_row_they_write() -> None:
    norm = (("in_out_ptr0", (M, 8)), ("in_ptr0", (M, 8)), ("in_ptr1", (8,)), ("out_ptr1", (M, 8)))
    assert storages("triton::norm.0", *norm, written=("in_out_ptr0", "out_ptr1")) == {2}


def test_a_scalar_that_inductor_reads_or_writes_is_no_parameter() -> None:
    assert storages("cpp::relu_sum.0", ("in_out_ptr0", (M, 8)), ("in_ptr0", ()), ("out_ptr0", ())) == set()


def test_what_inductor_writes_is_no_parameter_though_it_was_not_recorded_as_written() -> None:
    assert storages("cpp::relu_sum.0", ("in_out_ptr0", (M, 8)), ("in_ptr0", (8,)), ("out_ptr0", (8,))) == {1}


@pytest.mark.parametrize("read", [(1, M, 8), (2, M // 2, 8), (2, M // 2, 2, 4)])
@pytest.mark.parametrize("written", [(M, 8), (M, 2, 4)])
def test_a_batch_of_sequences_has_as_many_rows_as_all_their_tokens(
    read: tuple[int, ...], written: tuple[int, ...]
) -> None:
    given = (("in_ptr0", read), ("in_ptr1", (8,)), ("out_ptr0", written))
    assert storages("triton::norm.0", *given, written=("out_ptr0",)) == {1}


def test_an_index_that_inductor_reads_is_no_parameter() -> None:
    args = [
        Argument(name="in_ptr0", value=tensor(M, dtype="int64")),
        Argument(name="in_ptr1", value=tensor(999, 8, storage=1)),
        Argument(name="out_ptr0", value=tensor(M, 8, storage=2), written=True),
    ]
    bound = bind_call(Call(id=0, operator="triton::embedding.0", args=args), None, None, lambda _: None)
    assert persistent_storages(bound, CPU) == {("cpu", 1)}


def test_a_rotary_table_that_inductor_reads_is_no_parameter_of_one_layer() -> None:
    queries = (("in_ptr0", (M, 6 * 8)), ("in_ptr2", (999, 8)), ("in_ptr3", (4 * 8,)), ("out_ptr0", (M, 4, 8)))
    assert storages("triton::rotary.0", *queries, written=("out_ptr0",)) == {2}


def test_parts_of_one_storage_are_kept_together() -> None:
    args = [
        Argument(name="key_cache", value=tensor(4, 2, 2)),
        Argument(name="value_cache", value=tensor(4, 2, 2)),
        Argument(name="key", value=tensor(4, 2, storage=1)),
    ]
    bound = bind_call(Call(id=0, operator="x::y", args=args), None, None, lambda _: None)
    assert persistent_storages(bound, CPU) == {("cpu", 0)}


@pytest.mark.parametrize(
    "name", ["window", "k", "b", "topk_weight", "output_scale", "blocks", "wait", "routing_weights", "cached_tokens"]
)
def test_names_that_only_look_alike_are_none(name: str) -> None:
    assert not is_persistent_name(name)


def test_the_matrix_of_a_router_is_a_parameter() -> None:
    assert is_persistent_name("moe_router_weight_ptr") and not is_persistent_name("router_weights")


DEFINITIONS = ["gemm1_weights", "gemm1_weights_scale", "ckv_cache", "kpe_cache", "k_cache", "weight"]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_names_of_flashinfer_benchs_definitions_are_known(name: str) -> None:
    assert is_persistent_name(name)


FP8 = {
    "a": "float8_e4m3fn",
    "b": "float8_e4m3fn",
    "b_scales": "float32",
    "key_cache": "float8_e4m3fn",
    "weight": "bfloat16",
    "w13": "float8_e5m2",
}


def test_dummy_weights_of_fp8_are_nearly_all_zero() -> None:
    """And no others: neither activations, nor caches, nor scales, nor wider weights."""
    args = [
        Argument(name=name, value=tensor(128, 256, dtype=dtype, storage=number))
        for number, (name, dtype) in enumerate(FP8.items())
    ]
    bound = bind_call(Call(id=0, operator="x::y", args=args), None, None, lambda _: None)
    buffers = {("cpu", number): torch.empty(128 * 256 * 4, dtype=torch.uint8) for number in range(len(FP8))}
    for buffer, dtype in zip(buffers.values(), FP8.values(), strict=True):
        fill_random(buffer, dtype)
    draw_dummy_weights(bound, CPU, buffers, fp8_parameters(bound, CPU))
    drawn = {
        name: buffer.view(getattr(torch, dtype)).float()
        for (name, dtype), buffer in zip(FP8.items(), buffers.values(), strict=True)
    }
    assert {name for name, values in drawn.items() if values.abs().max() < 0.002} == {"b", "w13"}
    assert 0.01 < (drawn["b"] != 0).float().mean() < 0.04 and (drawn["w13"] != 0).float().mean() > 0.9
    assert drawn["b"].std() == pytest.approx(DUMMY_DEVIATION, rel=0.1)


@pytest.mark.parametrize(
    "beside", [("table", "int32"), ("pool", "bfloat16"), ("key_cache", "float8_e4m3fn"), ("weight_scale", "float32")]
)
@pytest.mark.parametrize("first", [False, True])
def test_a_storage_that_holds_anything_else_is_left(beside: tuple[str, str], first: bool) -> None:
    named = [("weight", "float8_e4m3fn"), beside]
    args = [Argument(name=name, value=tensor(8, 8, dtype=dtype)) for name, dtype in (named[::-1] if first else named)]
    bound = bind_call(Call(id=0, operator="x::y", args=args), None, None, lambda _: None)
    assert fp8_parameters(bound, CPU) == frozenset()


def test_what_inductor_reads_may_be_a_cache() -> None:
    args = [
        Argument(name="in_ptr0", value=tensor(4096, 16, dtype="float8_e4m3fn")),
        Argument(name="out_ptr0", value=tensor(M, 8, storage=1), written=True),
    ]
    bound = bind_call(Call(id=0, operator="triton::embedding.0", args=args), None, None, lambda _: None)
    assert persistent_storages(bound, CPU) and not fp8_parameters(bound, CPU)


@pytest.mark.parametrize("dummy", [False, True])
def test_a_call_is_rebuilt_with_dummy_weights_where_the_engine_had_them(dummy: bool) -> None:
    args = [
        Argument(name="self", value=tensor(16, 32, dtype="float8_e4m3fn")),
        Argument(name="mat2", value=tensor(32, 16, dtype="float8_e4m3fn", storage=1)),
        Argument(name="scale_a", value=tensor(storage=2)),
        Argument(name="scale_b", value=tensor(storage=3)),
    ]
    rebuilder = OpenSession(BytesIO(), "cpu", "cpu", None, False, TimingOptions(), dummy_weights=dummy).rebuilder()
    inputs = rebuilder.build(rebuilder.resolve(Call(id=0, operator="aten::_scaled_mm", args=args), None))
    assert inputs.args[0].float().abs().max() > 1
    assert (inputs.args[1].float().abs().max() < 0.002) == dummy

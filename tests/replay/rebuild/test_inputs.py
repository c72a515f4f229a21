"""Rebuilt arguments have the memory layout that was recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.replay.rebuild import memory, rebuild
from kcap.replay.rebuild.memory import Target, build_inputs, clone_inputs
from kcap.replay.rebuild.operators import resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import RANDOM_BLOCK, Inputs, Skip, bind_call
from kcap.schemas.recording.recording import Argument, Call, Sample, SampledTensor
from kcap.schemas.recording.values import Drift, Group, Opaque, TensorSpec, Value, contiguous_strides

HERE = Target("cpu", "cuda")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float4_e2m1fn_x2", "int8", "bool", "complex64", "uint16")


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    """A tensor as an engine may have it: permuted, padded, expanded, offset, sharing storage 0 or 1."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    padded = tuple(n + draw(st.integers(0, 2)) for n in shape)
    order = draw(st.permutations(range(len(shape))))
    by_order = dict(zip(order, contiguous_strides(tuple(padded[i] for i in order)), strict=True))
    strides = tuple(0 if draw(st.booleans()) and draw(st.booleans()) else by_order[i] for i in range(len(shape)))
    return TensorSpec(
        shape,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([strides, None])),
        draw(st.integers(0, 40)),
        draw(st.sampled_from(["cuda:0", "cpu"])),
        draw(st.integers(0, 1)),
    )


def rebuilt(args: list[Value], operator: str = "aten::stack", sample: Sample | None = None) -> Inputs:
    call = Call(id=0, operator=operator, args=[Argument(value=value) for value in args])
    bound = bind_call(call, sample, resolve_operator(operator).schema, lambda _: None)
    rebuild.resolve_integers(bound)
    return build_inputs(bound, HERE)


@settings(max_examples=200, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=4))
def test_shape_strides_offset_and_sharing_are_rebuilt_exactly(given: list[TensorSpec]) -> None:
    made = rebuilt([list(given)]).args[0]
    for spec, tensor in zip(given, made, strict=True):
        assert tuple(tensor.shape) == spec.shape
        assert tensor.stride() == spec.effective_strides
        assert tensor.storage_offset() == spec.offset
        assert tensor.dtype == getattr(torch, spec.dtype)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in made]
    for i, a in enumerate(given):
        for j, b in enumerate(given):
            if a.device == b.device:
                assert (a.storage == b.storage) == (pointers[i] == pointers[j])


@settings(max_examples=50, deadline=None)
@given(specs())
def test_a_clone_has_the_same_bytes_elsewhere(spec: TensorSpec) -> None:
    call = Call(id=0, operator="aten::clone", args=[Argument(value=spec)])
    bound = bind_call(call, None, resolve_operator("aten::clone").schema, lambda _: None)
    rebuild.resolve_integers(bound)
    first = build_inputs(bound, HERE)
    second = clone_inputs(bound, HERE, first)
    for key, buffer in first.buffers.items():
        assert torch.equal(buffer, second.buffers[key])
        assert buffer.data_ptr() != second.buffers[key].data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_floats_are_random_and_finite(dtype: str) -> None:
    (tensor,) = rebuilt([TensorSpec((64, 64), dtype)], "aten::clone").args
    values = tensor.float()
    assert values.isfinite().all()
    assert 0.9 < values.std() < 1.1


def test_two_views_of_one_cache_take_the_memory_of_one() -> None:
    pair = [TensorSpec((9, 4), "float32", (8, 1), offset, "cuda", 3) for offset in (0, 4)]
    inputs = rebuilt([list(pair)])
    (size,) = (len(buffer) for buffer in inputs.buffers.values())
    assert size == 320  # 8 rows of 8, then 8 elements, 4 bytes each, up to a multiple of 64


def test_a_petabyte_is_refused_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((1 << 25, 1 << 25), "uint8", device="cuda")
    bound = bind_call(
        Call(id=0, operator="aten::clone", args=[Argument(value=spec)]),
        None,
        resolve_operator("aten::clone").schema,
        _no,
    )
    sizes = memory.buffer_sizes(bound, "cpu", "cuda")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(Skip, match=r"needs 1.05e\+06 GiB, .* free on cpu"):
        memory.check_free(sizes, (), 0, "cpu")


def test_indices_without_values_are_valid_for_aten() -> None:
    weight, ids = TensorSpec((7, 3), "float32"), TensorSpec((500,), "int64", storage=1)
    inputs = rebuilt([weight, ids], "aten::embedding")
    assert set(inputs.args[1].tolist()) == set(range(7))
    masked = [TensorSpec((2, 3), "bool", storage=1), TensorSpec((6,), "int64", storage=2)]
    found = rebuilt([TensorSpec((2, 3, 5), "float32"), list(masked)], "aten::index.Tensor")
    assert int(found.args[1][1].max()) <= 4


SCATTERED = ("self", "mask", "source")


@pytest.mark.parametrize(
    ("operator", "names", "mask"),
    [
        ("aten::index_put_", ("self", "indices", "values"), TensorSpec((20,), "bool", storage=1)),
        ("aten::masked_scatter", SCATTERED, TensorSpec((20, 1), "bool", storage=1)),
        ("aten::masked_scatter", SCATTERED, TensorSpec((20, 3), "bool", (1, 0), storage=1)),  # expanded
    ],
)
def test_a_mask_has_as_many_true_elements_as_values_are_written(
    operator: str, names: tuple[str, ...], mask: Value
) -> None:
    values = [TensorSpec((20, 3), "float32"), mask, TensorSpec((7, 3), "float32", storage=2)]
    values = [values[0], [mask] if operator == "aten::index_put_" else mask, values[2]]
    args = [Argument(name=name, value=value) for name, value in zip(names, values, strict=True)]
    resolved = resolve_operator(operator)
    bound = bind_call(Call(id=0, operator=operator, args=args), None, resolved.schema, _no)
    rebuild.resolve_mask(bound)
    inputs = build_inputs(bound, HERE)
    chosen = inputs.args[1][0] if isinstance(inputs.args[1], list) else inputs.args[1]
    assert int(chosen.expand(20, 3).sum() if chosen.dim() == 2 else 3 * chosen.sum()) == 21
    resolved.call(*inputs.args, **inputs.kwargs)


def test_no_row_is_written_twice_by_indices_unless_these_add() -> None:
    table, rows = TensorSpec((500, 3), "float32"), TensorSpec((400,), "int64", storage=1)
    values: list[Value] = [table, [rows], TensorSpec((400, 3), "float32", storage=2)]
    assert len(set(rebuilt(values, "aten::index_put_").args[1][0].tolist())) == 400
    assert len(set(rebuilt([*values, True], "aten::index_put_").args[1][0].tolist())) < 400
    more: list[Value] = [table, [TensorSpec((600,), "int64", storage=1)], TensorSpec((600, 3), "float32", storage=2)]
    assert rebuilt(more, "aten::index_put_").args[1][0].unique().numel() > 300  # there are no 600
    copied = rebuilt([table, 0, rows, values[2]], "aten::index_copy_").args[2]
    assert copied.unique().numel() == 400
    wide, chosen = TensorSpec((4, 50), "float32"), TensorSpec((4, 30), "int64", storage=1)
    scattered = rebuilt([wide, -1, chosen, TensorSpec((4, 30), "float32", storage=2)], "aten::scatter_.src").args[2]
    assert all(row.unique().numel() == 30 for row in scattered) and scattered.max() < 50


def test_integers_that_are_written_by_indices_are_data() -> None:
    numbers, rows = TensorSpec((500,), "int64"), TensorSpec((9,), "int64", storage=1)
    data = rebuilt([numbers, [rows], TensorSpec((9,), "int64", storage=2)], "aten::index_put_").args[0]
    assert data.unique().numel() == 7


@given(st.integers(-5, 5), st.integers(1, 1 << 40), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_distinct_numbers_are_in_their_range(low: int, span: int, shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    drawn = rebuild.draw_distinct(low, low + span - 1, tuple(shape), dim)
    assert list(drawn.shape) == shape and drawn.dtype == torch.int64
    assert ((drawn >= low) & (drawn < low + span)).all()
    if shape[dim] <= span:
        assert all(len(set(row.tolist())) == shape[dim] for row in drawn.movedim(dim, -1).reshape(-1, shape[dim] or 1))


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "int8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1 << 12, 2056)])
def test_many_numbers_are_those_of_one_block(shape: tuple[int, ...], dtype: str) -> None:
    drawn = rebuild.draw_numbers(1, 7, shape, dtype)
    assert drawn.shape == shape and drawn.dtype == (torch.int64 if "int8" not in dtype else getattr(torch, dtype))
    rest = drawn.flatten()[RANDOM_BLOCK:]
    assert torch.equal(rest, drawn.flatten()[: len(rest)])
    assert not shape or not drawn.numel() or drawn.unique().tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_no_number_is_drawn_that_its_dtype_has_not(dtype: str) -> None:
    drawn = rebuild.draw_numbers(0, 999, (4096,), dtype)
    assert drawn.min() >= 0 and drawn.max() <= torch.iinfo(getattr(torch, dtype)).max


def test_indices_outside_aten_are_never_guessed() -> None:
    spec = TensorSpec((4,), "int32")
    with pytest.raises(Skip, match="were not recorded"):
        rebuilt([spec], "quantized::relu6")


def test_drifting_scalars_and_offsets_come_from_the_sample() -> None:
    args: list[Value] = [TensorSpec((4,), "float32", offset=None), [Drift("int"), 1]]
    sample = Sample(call=0, phase="decode", scalars={"1.0": 4}, offsets={"0": 8})
    inputs = rebuilt(args, "aten::view", sample)
    assert inputs.args[0].storage_offset() == 8
    assert inputs.args[1] == [4, 1]
    with pytest.raises(Skip, match="no Sample"):
        rebuilt(args, "aten::view")


def test_recorded_ranges_are_kept() -> None:
    sample = Sample(call=0, phase="decode", tensors={"1": SampledTensor(low=3, high=90)})
    inputs = rebuilt([TensorSpec((7, 3), "float32"), TensorSpec((99,), "int64", storage=1)], "aten::embedding", sample)
    assert set(inputs.args[1].tolist()) == {3, 4, 5, 6}


def _no(_: SampledTensor) -> None:
    return None


def test_a_generators_state_is_not_recorded_and_the_devices_own_draws() -> None:
    values: list[Value] = [0, 9, [4], Opaque("Generator")]
    *given, generator = rebuilt(values, "aten::randint.low_generator").args
    drawn = torch.ops.aten.randint.low_generator(*given, generator=generator)
    assert drawn.shape == (4,) and drawn.min() >= 0
    with pytest.raises(Skip, match=r"opaque \(ReduceOp\)"):
        rebuilt([*values[:3], Opaque("ReduceOp")], "aten::randint.low_generator")


def test_a_collective_is_skipped_where_it_has_no_peers() -> None:
    args = [Argument(value=[TensorSpec((2, 2), "float32")]), Argument(value=Group(4, 1, "tp"))]
    call = Call(id=0, operator="c10d::allreduce_", args=args)
    with pytest.raises(Skip, match=r"process group \(of 4\)"):
        Rebuilder("cpu", "cpu", None).resolve(call, None)

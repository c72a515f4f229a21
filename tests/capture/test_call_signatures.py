"""How a call is written down: its arguments, what folds, and what a Sample holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kcap.schemas.recording.recording import Call, Recording
from kcap.schemas.recording.values import Drift, Folded, Opaque, TensorSpec, TorchConstant, tensors

Record = Callable[..., Recording]
both = pytest.mark.parametrize("recorder", ["native", "python"])
A = torch.randn(4, 4)


@torch.library.custom_op("kcaptest::scaled", mutates_args=())
def scaled(x: torch.Tensor, length: int, factor: float, path: str) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("kcaptest::paged", mutates_args=())
def paged(x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("kcaptest::labelled", mutates_args=())
def labelled(x: torch.Tensor, label: str) -> torch.Tensor:
    return x.clone()


def only(recording: Recording, operator: str) -> Call:
    (call,) = (call for call in recording.calls if call.operator == operator)
    return call


def specs(recording: Recording, operator: str) -> list[TensorSpec]:
    return [arg.value for arg in only(recording, operator).args if isinstance(arg.value, TensorSpec)]


@both
def test_a_tensor_has_its_shape_type_strides_and_offset(recorder: str, record: Record) -> None:
    base = torch.zeros(6, 8, dtype=torch.bfloat16)
    (spec,) = specs(record(lambda _: torch.abs(base[2:, 1:].t()), recorder), "aten::abs")
    assert spec == TensorSpec((7, 4), "bfloat16", strides=(1, 8), offset=17, device="cpu", storage=0)


@both
def test_tensors_that_share_memory_have_one_storage(recorder: str, record: Record) -> None:
    other = torch.randn(4, 4)
    shared = record(lambda _: torch.add(A, A.view(16).view(4, 4)), recorder)
    apart = record(lambda _: torch.add(A, other), recorder)
    assert [spec.storage for spec in specs(shared, "aten::add.Tensor")] == [0, 0]
    assert [spec.storage for spec in specs(apart, "aten::add.Tensor")] == [0, 1]


@both
def test_tensors_in_a_list_share_memory_too(recorder: str, record: Record) -> None:
    call = only(record(lambda _: torch.cat([A[:2], torch.ones(1, 4), A[2:]]), recorder), "aten::cat")
    assert [spec.storage for _, spec in call.tensors()] == [0, 1, 0]
    assert [spec.offset for _, spec in call.tensors()] == [0, 0, 8]


@both
@pytest.mark.parametrize("scalar", [2, 2.5, True, float("inf"), -0.1, 1e-300, 1 << 40])
def test_a_scalar_operand_is_a_plain_scalar(scalar: Any, recorder: str, record: Record) -> None:
    value = only(record(lambda _: A * scalar, recorder), "aten::mul.Tensor").args[1].value
    assert value == scalar
    assert type(value) is type(scalar)


def test_a_complex_scalar_is_one(record: Record) -> None:
    assert only(record(lambda _: A * 2j), "aten::mul.Tensor").args[1].value == 2j


@both
def test_arguments_say_what_is_default_keyword_and_written(recorder: str, record: Record) -> None:
    out = torch.empty(4, 4)
    call = only(record(lambda _: torch.add(A, A, alpha=1, out=out), recorder), "aten::add.out")
    assert [(a.name, a.keyword, a.default, a.written) for a in call.args] == [
        ("self", False, False, False),
        ("other", False, False, False),
        ("alpha", True, True, False),
        ("out", True, False, True),
    ]
    twice = only(record(lambda _: torch.add(A, A, alpha=2), recorder), "aten::add.Tensor")
    assert (twice.args[2].value, twice.args[2].default) == (2, False)


@both
def test_enumerations_are_named(recorder: str, record: Record) -> None:
    def body(_: Any) -> None:
        torch.zeros(3, dtype=torch.bfloat16, device="cpu")
        A.contiguous(memory_format=torch.contiguous_format)
        A.view(1, 1, 4, 4).clone(memory_format=torch.channels_last)

    recording = record(body, recorder)
    zeros = {arg.name: arg.value for arg in only(recording, "aten::zeros").args}
    assert zeros["dtype"] == TorchConstant("dtype", "bfloat16")
    assert zeros["device"] == TorchConstant("device", "cpu")
    clone = {arg.name: arg.value for arg in only(recording, "aten::clone").args}
    assert clone["memory_format"] == TorchConstant("memory_format", "channels_last")


@both
def test_calls_that_differ_in_anything_else_stay_apart(recorder: str, record: Record) -> None:
    def body(_: Any) -> None:
        torch.sum(A, 0), torch.sum(A, 1), torch.sum(A, 0, keepdim=True), torch.sum(A.double(), 0)
        torch.sum(A[:3], 0), torch.sum(A.t(), 0)

    sums = [call for call in record(body, recorder).calls if call.operator == "aten::sum.dim_IntList"]
    assert [call.total for call in sums] == [1] * 6


@both
def test_layers_fold_into_one_call(recorder: str, record: Record) -> None:
    def body(_: Any) -> None:
        for layer in range(40):
            torch.ops.kcaptest.scaled(A, 1, 1.0, f"model.layers.{layer}.self_attn")

    call = only(record(body, recorder), "kcaptest::scaled")
    assert call.total == 40
    assert call.args[3].value == Folded("model.layers.*.self_attn")


@both
def test_a_word_that_is_no_path_stays_as_it_is(recorder: str, record: Record) -> None:
    recording = record(lambda _: [torch.ops.kcaptest.labelled(A, kind) for kind in ("fp8", "fp16")], recorder)
    labels = {call.args[1].value for call in recording.calls if call.operator == "kcaptest::labelled"}
    assert labels == {"fp8", "fp16"}


@both
def test_a_scalar_that_drifts_makes_one_call_whose_samples_carry_it(recorder: str, record: Record) -> None:
    def body(session: Any) -> None:
        for step in range(200):
            with session.step("decode"):
                torch.ops.kcaptest.scaled(A, 1000 + step, 0.5, "layers.0")

    recording = record(body, recorder)
    call = only(recording, "kcaptest::scaled")
    assert call.total == 200
    assert isinstance(call.args[1].value, Drift)
    assert call.args[2].value == 0.5
    samples = [sample for sample in recording.samples if sample.call == call.id]
    assert len(samples) > 1
    seen = [sample.scalars["1"] for sample in samples]
    assert all(1000 <= value < 1200 for value in seen)
    assert all(s.step is None or s.scalars["1"] == 1000 + s.step for s in samples), "taken in the step that it names"
    assert any(s.step is not None for s in samples)
    assert len(set(seen)) == len(seen)
    assert recording.metadata.totals["calls"] == 1


@both
def test_scalars_of_a_list_drift_together(recorder: str, record: Record) -> None:
    """As those of a foreach optimizer, which depend on the step."""

    def body(session: Any) -> None:
        tensors = [torch.ones(2), torch.ones(3)]
        for step in range(100):
            with session.step("other"):
                torch._foreach_addcdiv_(tensors, tensors, tensors, [1.0 + step, 2.0 + step])

    recording = record(body, recorder)
    call = only(recording, "aten::_foreach_addcdiv_.ScalarList")
    assert (call.total, call.args[3].value) == (100, Drift("number"))
    samples = [sample for sample in recording.samples if sample.call == call.id]
    assert all(s.scalars["3"] == [1.0 + s.step, 2.0 + s.step] for s in samples if s.step is not None)
    assert any(s.step is not None for s in samples)


def test_a_complex_scalar_drifts_like_any_other(record: Record) -> None:
    waves = torch.ones(2, dtype=torch.complex64)

    def body(session: Any) -> None:
        for step in range(100):
            with session.step("other"):
                torch.mul(waves, 1j * step)

    assert only(record(body), "aten::mul.Tensor").args[1].value == Drift("number")


def test_under_autocast_a_call_has_the_types_that_its_kernel_computes_in(record: Record) -> None:
    def body(_: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.functional.linear(A, A)
            torch.exp(A.bfloat16())
        with torch.autocast("cuda", dtype=torch.float16):  # of another device than the tensors'
            torch.mm(A, A)

    recording = record(body)
    types = {
        call.operator: [spec.dtype for _, spec in tensors([a.value for a in call.args])] for call in recording.calls
    }
    assert types == {
        "aten::to.dtype": ["float32"],
        "aten::linear": ["bfloat16"] * 2,
        "aten::exp": ["bfloat16"],
        "aten::mm": ["float32"] * 2,
    }
    assert only(recording, "aten::to.dtype").total == 3


def test_samples_are_spread_over_the_steps_and_the_same_every_time(record: Record) -> None:
    def body(session: Any) -> None:
        for step in range(2000):
            with session.step("decode"):
                torch.ops.kcaptest.scaled(A, step, 0.5, "layers.0")

    def drawn() -> list[Any]:
        recording = record(body)
        return [(sample.step, sample.scalars) for sample in recording.samples]

    first = drawn()
    steps = [step for step, _ in first]
    assert len(steps) == 4
    assert sum(steps) / 4 > 300, "the first steps, seen before the drift was known, must not outweigh the rest"
    assert first == drawn()


@pytest.mark.parametrize(("ints", "kept"), [(1 << 16, 4), (1 << 17, 2), (1 << 18, 1), (1 << 19, 1)])
def test_a_call_has_fewer_samples_where_their_values_are_long(ints: int, kept: int, record: Record) -> None:
    tables = [torch.full((ints,), step, dtype=torch.int32) for step in range(6)]

    def body(session: Any) -> None:
        for table in tables:
            with session.step("decode"):
                torch.ops.kcaptest.paged(A, table)

    assert len(record(body).samples) == kept


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sampled_values_are_those_that_were_there_however_they_repeat(
    recorder: str, dtype: torch.dtype, record: Record
) -> None:
    drawn = random.Random(1)
    counts = [[drawn.randrange(1 + size % 3) for _ in range(size)] for size in (1, 3, 4, 5, 20, 21, 22, 23, 600)]
    counts += [[2] * 3, [0] * 2000, [1, 1, 1, 1, 9, 9, 9, 4, 4, 4, 4]]
    tables = [torch.tensor(count, dtype=dtype) for count in counts]
    recording = record(lambda _: [torch.ops.kcaptest.paged(A, table) for table in tables], recorder)
    held = {
        tuple(recording.array(tensor).tolist()) for sample in recording.samples for tensor in sample.tensors.values()
    }
    assert held == set(map(tuple, counts))


@both
def test_scalars_that_mean_different_things_stay_apart(recorder: str, record: Record) -> None:
    recording = record(lambda _: [torch.softmax(A, dim) for dim in (0, 1) for _ in range(5)], recorder)
    softmax = [call for call in recording.calls if call.operator in ("aten::softmax.int", "aten::_softmax")]
    assert [(call.args[1].value, call.total) for call in softmax] == [(0, 5), (1, 5)]


@both
def test_offsets_alone_make_one_call_whose_samples_carry_them(recorder: str, record: Record) -> None:
    cache = torch.zeros(64, 4, 4)

    def body(session: Any) -> None:
        for _ in range(4):
            with session.step("decode"):
                for layer in range(32):
                    torch.mm(cache[layer], A)

    recording = record(body, recorder)
    call = only(recording, "aten::mm")
    assert call.total == 128
    first, second = (arg.value for arg in call.args)
    assert (first.offset, first.storage, second.offset, second.storage) == (None, 0, 0, 1)
    samples = [sample.offsets["0"] for sample in recording.samples if sample.call == call.id]
    assert 1 < len(samples) <= 4
    assert set(samples) <= {layer * 16 for layer in range(32)}


@both
def test_two_layers_that_differ_in_an_offset_are_one_call_already(recorder: str, record: Record) -> None:
    cache = torch.zeros(2, 4, 4)
    recording = record(lambda _: [torch.mm(cache[layer], A) for layer in (0, 1)], recorder)
    call = only(recording, "aten::mm")
    assert call.total == 2
    assert {sample.offsets["0"] for sample in recording.samples if sample.call == call.id} == {0, 16}


@both
def test_the_values_of_block_tables_are_kept_together(recorder: str, record: Record) -> None:
    table = torch.tensor([[3, 1], [7, 0]], dtype=torch.int32)
    recording = record(lambda _: torch.ops.kcaptest.paged(A, table), recorder)
    (sample,) = recording.samples
    assert (sample.tensors["1"].low, sample.tensors["1"].high) == (0, 7)
    assert recording.value(sample.tensors["1"]).tolist() == table.tolist()


@both
def test_a_block_table_that_is_a_view_keeps_the_rows_it_shows(recorder: str, record: Record) -> None:
    table = torch.arange(64, dtype=torch.int32).view(8, 8)[1:3, ::2]
    recording = record(lambda _: torch.ops.kcaptest.paged(A, table), recorder)
    (sample,) = recording.samples
    assert recording.value(sample.tensors["1"]).tolist() == table.tolist()


TOKENS = [7_000_001, 7_000_003, 7_000_007]


@both
@pytest.mark.parametrize("keep", [False, True])
def test_values_of_token_ids_are_kept_only_if_asked_for(recorder: str, keep: bool, record: Record) -> None:
    tokens = torch.tensor(TOKENS)
    weight = torch.zeros(1, 2).expand(TOKENS[-1] + 1, 2)

    def body(_: Any) -> None:
        torch.nn.functional.embedding(tokens, weight)
        weight[tokens], torch.cat([tokens, tokens]), tokens.clone(), weight.index_select(0, tokens), tokens + 1

    recording = record(body, recorder, keep_tokens=keep)
    held = {
        value
        for sample in recording.samples
        for tensor in sample.tensors.values()
        for value in (tensor.low, tensor.high, *(recording.value(tensor).flatten().tolist() if tensor.file else ()))
    }
    assert set(TOKENS) <= held if keep else not set(TOKENS) & held


def test_scalars_made_of_token_ids_are_not_kept(record: Record) -> None:
    """`tokens.tolist()` and `torch.tensor([...])` pass them as scalars of no operator."""

    def body(_: Any) -> None:
        torch.tensor(TOKENS).tolist()
        torch.tensor(TOKENS[0]).item()

    recording = record(body)
    text = b"".join(path.read_bytes() for path in recording.path.rglob("*") if path.is_file())
    assert not any(str(token).encode() in text for token in TOKENS)


@both
def test_a_sparse_tensor_is_opaque_and_does_no_harm(recorder: str, record: Record) -> None:
    sparse = torch.eye(4).to_sparse()
    recording = record(lambda _: torch.mm(sparse, A), recorder)
    assert all(tap.status in ("ok", "absent") for tap in recording.metadata.taps)
    assert recording.calls


@both
@pytest.mark.parametrize(
    ("lazy", "kind"), [(lambda z: z.conj(), "conjugated"), (torch._neg_view, "negated")], ids=["conj", "neg"]
)
def test_a_tensor_whose_memory_has_other_numbers_is_another(
    recorder: str, lazy: Any, kind: str, record: Record
) -> None:
    z = torch.ones(2, 2, dtype=torch.complex64)

    def body(_: Any) -> None:
        torch.mm(z, z)
        torch.mm(lazy(z), z)

    recording = record(body, recorder)
    products = [call for call in recording.calls if call.operator.startswith("aten::mm")]
    assert [call.total for call in products] == [1, 1]
    assert any(argument.value == Opaque(f"tensor {kind}") for call in recording.calls for argument in call.args)


@both
def test_recording_goes_on_after_a_nested_tensor(recorder: str, record: Record) -> None:
    def body(_: Any) -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        torch.add(nested, nested)
        torch.mm(A, A)

    recording = record(body, recorder)
    assert all(tap.status in ("ok", "absent") for tap in recording.metadata.taps)
    assert only(recording, "aten::mm").total == 1

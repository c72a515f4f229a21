"""A Program's Calls ready to run: who shares memory, who has sets of its own, what is put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from handmade import call, tensor
from programs import CALLS, M, N, linear, relu

from kcap.replay.program import prepared
from kcap.replay.program.flow import NOT_HANDED_ON
from kcap.replay.program.prepared import PreparedCalls, ProgramSnapshot, scale_weights
from kcap.replay.program.runner import ProgramRunner
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.memory import Target, build_inputs, storage_key, tensor_view
from kcap.replay.rebuild.persistent import persistent_storages
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.values import TensorSpec, Value

Write = Callable[..., Path]


@pytest.fixture
def parts(recorded: Write) -> Callable[..., PreparedCalls]:
    def made(counts: Mapping[int, int], calls: list = CALLS) -> PreparedCalls:
        return PreparedCalls(Rebuilder("cpu", "cpu", recorded(calls)), counts, {})

    return made


def floats(*shape: int, storage: int = 0) -> TensorSpec:
    return TensorSpec(shape, "bfloat16", storage=storage)


def codes(rows: int, columns: int, storage: int = 0) -> TensorSpec:
    return TensorSpec((rows, columns), "float8_e4m3fn", storage=storage)


def words(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "int32", storage=2)


def test_each_layer_has_weights_of_its_own_and_all_the_same_activations(parts: Callable[..., PreparedCalls]) -> None:
    linears = parts({0: 3}).all[0].sets
    assert len({inputs.args[1].data_ptr() for inputs in linears}) == 3
    assert len({inputs.args[0].data_ptr() for inputs in linears}) == 1
    assert all(torch.equal(inputs.args[1], linears[0].args[1]) for inputs in linears)


def test_what_one_call_writes_lies_where_the_next_one_reads(parts: Callable[..., PreparedCalls]) -> None:
    made = parts({0: 1, 1: 1})
    (linear_inputs,), (relu_inputs,) = made.all[0].sets, made.all[1].sets
    assert linear_inputs.args[0].data_ptr() == relu_inputs.args[0].data_ptr()
    assert float(relu_inputs.args[0].abs().sum()) > 0


def test_weights_of_two_calls_never_share(recorded: Write) -> None:
    made = PreparedCalls(Rebuilder("cpu", "cpu", recorded([linear(0), linear(1)])), {0: 1, 1: 1}, {})
    first, second = (made.all[number].sets[0].args for number in (0, 1))
    assert first[1].data_ptr() != second[1].data_ptr()
    assert first[0].data_ptr() == second[0].data_ptr()


def test_two_activations_of_one_call_never_share(recorded: Write) -> None:
    add = call("aten::add.Tensor", tensor(M, N), tensor(M, N, storage=1), id=0)
    (inputs,) = PreparedCalls(Rebuilder("cpu", "cpu", recorded([add])), {0: 1}, {}).all[0].sets
    assert inputs.args[0].data_ptr() != inputs.args[1].data_ptr()


def test_other_sizes_and_dtypes_have_other_buffers(recorded: Write) -> None:
    calls = [
        relu(0),
        relu(1, (8 * M, N)),
        call("aten::relu_", tensor(M, 2 * N, dtype="bfloat16"), id=2),
        relu(3, (3, N)),
    ]
    made = PreparedCalls(Rebuilder("cpu", "cpu", recorded(calls)), dict.fromkeys(range(4), 1), {})
    places = [made.all[n].sets[0].args[0].data_ptr() for n in range(4)]
    assert len(set(places[:3])) == 3
    assert places[3] == places[0]  # three rows instead of four: as large, up to a power of two


def test_turns_go_round_the_sets(parts: Callable[..., PreparedCalls]) -> None:
    part = parts({0: 2}).all[0]
    for _ in range(3):
        part.run()
    assert part.turn == 3


def test_without_room_for_a_set_each_there_are_fewer(parts: Callable[..., PreparedCalls], monkeypatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 6 * N * N * 4)  # half of it is for three sets
    assert len(parts({0: 4}).all[0].sets) == 4
    assert len(parts({0: 5}).all[0].sets) == 1


def test_a_call_that_cannot_be_rebuilt_says_why_and_the_others_stand(parts: Callable[..., PreparedCalls]) -> None:
    made = parts({0: 1, 3: 2})
    assert list(made.good) == [0]
    assert made.all[3].failed and made.all[3].failed["status"] == "skipped"
    assert "no library is known" in made.all[3].failed["reason"]


def test_what_is_written_is_put_back_once_however_many_calls_share_it(recorded: Write) -> None:
    calls = [relu(0), relu(1), linear(2)]
    made = PreparedCalls(Rebuilder("cpu", "cpu", recorded(calls)), {0: 1, 1: 1, 2: 1}, {})
    restore = ProgramSnapshot(made.good.values())
    assert len(restore.saved) == 1
    tensor_of = made.all[0].sets[0].args[0]
    before = tensor_of.clone()
    made.all[0].run()
    assert not torch.equal(tensor_of, before)
    restore()
    assert torch.equal(tensor_of, before)


def test_bytes_count_shared_memory_once(parts: Callable[..., PreparedCalls]) -> None:
    assert parts({0: 3, 1: 5}).bytes == 3 * N * N * 4 + M * N * 4


def test_a_call_that_loses_numbers_leaves_what_others_share(recorded: Write) -> None:
    grows = call("aten::exp_", tensor(M, N), id=0)
    runner = ProgramRunner(Rebuilder("cpu", "cpu", recorded([grows, relu(1)])))
    parts, _, notes = runner._prepare([0] * 6, {}, gpu=True)
    assert (notes, parts.all[0].apart, parts.all[0].slots) == ([NOT_HANDED_ON + "aten::exp_"], True, {})
    parts, _, notes = runner._prepare([1, 1], {}, gpu=True)
    assert (notes, parts.all[1].apart) == ([], False)


def test_what_is_put_back_is_what_was_there_before_anything_ran(recorded: Write) -> None:
    adds = call("aten::add_.Tensor", tensor(M, N), tensor(M, N, storage=1), id=0)
    runner = ProgramRunner(Rebuilder("cpu", "cpu", recorded([adds])))
    built = PreparedCalls(runner.rebuilder, {0: 2}, {}).all[0].sets[0].args[0]
    parts, restore, notes = runner._prepare([0, 0], {}, gpu=True)
    (inputs,) = {id(one): one for one in parts.all[0].sets}.values()
    assert notes == [] and not torch.equal(inputs.args[0], built), "it was run once to look at the numbers"
    restore()
    assert torch.equal(inputs.args[0], built)


def test_what_is_too_large_to_be_put_back_is_told(recorded: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_RESTORED_BYTES", 0)
    parts = PreparedCalls(Rebuilder("cpu", "cpu", recorded([relu(0)])), {0: 1}, {})
    assert ProgramSnapshot(parts.good.values()).notes == ["written to, and too large to be put back between samples: 1"]


@pytest.mark.parametrize(
    ("values", "scaled", "deviation"),
    [
        ({"input": floats(8, 512), "weight": floats(512, 512, storage=1)}, "1", 1.0),
        ({"A": floats(8, 512), "B": words(64, 512), "group_scales": floats(4, 512, storage=1)}, "2", 4.6),
        (
            {"a": [codes(8, 512), floats(8, 4, storage=3)], "b": [codes(512, 512, 2), floats(4, 4, storage=1)]},
            "1.1",
            1.0,
        ),
        ({"x": floats(8, 512), "k_cache": codes(4096, 4096, 5), "weight": floats(512, 512, storage=1)}, "2", 1.0),
    ],
)
def test_what_a_weight_makes_of_numbers_is_as_large_as_they_are(
    values: dict[str, Value], scaled: str, deviation: float
) -> None:
    """Of a quantized weight the scales see to it; `deviation`: of its codes. Nothing else is scaled."""
    bound = BoundCall("mine::product", [Argument(name=name, value=value) for name, value in values.items()])
    target = Target("cpu", "cpu")
    buffers = build_inputs(bound, target).buffers
    specs = {path: spec for path, spec in bound.tensors() if BY_NAME[spec.dtype].kind == "float"}
    before = {path: tensor_view(spec, buffers[storage_key(spec, target)]).float() for path, spec in specs.items()}
    scale_weights(bound, target, buffers, persistent_storages(bound, target))
    after = {path: tensor_view(spec, buffers[storage_key(spec, target)]).float() for path, spec in specs.items()}
    factors = {path: float((after[path] / numbers).nanmedian()) for path, numbers in before.items()}
    assert 0.5 < factors.pop(scaled) * deviation * math.sqrt(512) < 2
    assert set(factors.values()) == {1.0}

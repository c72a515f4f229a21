"""A prepared Workload: its reference and its arguments, and what a first run of them tells."""

from __future__ import annotations

import pytest
import torch
from definitions import copying, definition, tensor, workload

from kcap.replay.calls.runner import TimingOptions
from kcap.replay.datasets.reference import PreparedReference, prepare_reference
from kcap.replay.datasets.run_reference import (
    clone_arguments,
    inputs_of_arguments,
    measure_reference,
    rotation_of_reference,
    try_reference,
)
from kcap.replay.timing import rotation
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.results.measurement import Cache


def prepared(of: Definition) -> PreparedReference:
    return prepare_reference(of, workload(of), None)


def test_the_reference_is_called_by_name_and_a_solution_by_position() -> None:
    row, column = tensor("float32", "N"), tensor("float32", "M")
    ready = prepared(definition({"x": row, "y": column}, {"N": 4, "M": 5}, reference="def run(y, x):\n    return x\n"))
    assert [len(value) for value in ready.inputs.inputs] == [4, 5]
    assert torch.equal(ready.reference(*ready.arguments), ready.inputs.inputs[0])
    assert ready.notes == ["called by name, by position it would fail: its reference takes y, x"]


def test_preparing_runs_nothing_until_the_reference_is_asked_for() -> None:
    ready = prepared(copying("raise RuntimeError('ran')\ndef run(x):\n    return x\n"))
    assert len(ready.arguments) == 1
    with pytest.raises(RuntimeError, match="ran"):
        _ = ready.reference


def test_the_same_seed_makes_the_same_inputs_and_a_limit_is_kept() -> None:
    of = copying("def run(x):\n    return x\n")
    one, same, other = (prepare_reference(of, workload(of), None, seed=seed).arguments[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(Skip, match="its tensors take"):
        prepare_reference(of, workload(of), None, limit=31)


@pytest.mark.parametrize(
    ("body", "written"), [("return x.mul_(2)", True), ("x[1:3] = 0\n    return x", True), ("return x * 2", False)]
)
def test_a_first_run_tells_what_the_reference_writes_to_and_leaves_it_as_it_was(body: str, written: bool) -> None:
    ready = prepared(copying(f"def run(x):\n    {body}\n"))
    inputs = inputs_of_arguments(ready.arguments)
    before = inputs.args[0].clone()
    with torch.inference_mode():
        assert try_reference(ready, inputs) == ([("cpu", 0)] if written else [])
    assert torch.equal(inputs.args[0], before)


ROWS, WEIGHT = 32, 16  # bytes


@pytest.mark.parametrize(
    ("cache", "stays", "moved", "fresh"),
    [
        ("serving", 1 << 20, ["weight"], WEIGHT),
        ("serving", ROWS - 1, ["x", "weight"], ROWS + WEIGHT),  # the rows take more than stays
        ("cold", 1 << 20, ["x", "weight"], ROWS + WEIGHT),
        ("warm", 1 << 20, ["x", "weight"], 0),  # it lies at other places, and stays
    ],
)
def test_of_a_reference_goes_round_what_the_state_says(
    monkeypatch: pytest.MonkeyPatch, cache: Cache, stays: int, moved: list[str], fresh: int
) -> None:
    monkeypatch.setattr(rotation, "l2_resident_bytes", lambda device: stays)
    inputs = {"x": tensor("float32", "M", "K"), "weight": tensor("float32", "K")}
    run = "def run(x, weight):\n    return x + weight\n"
    of = definition(inputs, {"M": 2, "K": 4}, op_type="group_norm", reference=run)
    ready = prepared(of)
    first = inputs_of_arguments(ready.arguments)
    other = rotation_of_reference(cache, ready, first, "cpu").clone()
    places = [a.data_ptr() != b.data_ptr() for a, b in zip(first.args, other.args, strict=True)]
    assert [name for name, elsewhere in zip(inputs, places, strict=True) if elsewhere] == moved
    answer = measure_reference("cpu", TimingOptions(cache), ready, {"seed": 0, "seconds": 0.001})
    assert answer["work"]["fresh"] == fresh


def test_a_clone_has_the_content_at_another_address() -> None:
    inputs = inputs_of_arguments([torch.arange(6.0).view(2, 3).t(), 0.5, torch.tensor(3), None])
    again = clone_arguments(inputs)
    assert again.args[1::2] == [0.5, None]
    for number in (0, 2):
        assert torch.equal(again.args[number], inputs.args[number])
        assert again.args[number].data_ptr() != inputs.args[number].data_ptr()
    assert {key: len(buffer) for key, buffer in again.buffers.items()} == {("cpu", 0): 24, ("cpu", 2): 8}

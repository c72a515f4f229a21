"""What a Call returns lies where the next one reads, while a Program is captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import call, tensor
from programs import M, N, linear, relu

from kcap.replay.program.flow import Flow
from kcap.replay.program.parts import Part, Parts
from kcap.replay.rebuild import Rebuilder
from kcap.schemas.recording import Call

Write = Callable[..., Path]
Log = list[tuple[int, Any, Any]]  # Call, its inputs, what it returned


@pytest.fixture
def ran(recorded: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Call], list[int]], Log]:
    """Runs `order` in one Flow."""

    def run(calls: list[Call], order: list[int]) -> Log:
        parts = Parts(Rebuilder("cpu", "cpu", recorded(calls)), {n: order.count(n) for n in order}, {})
        log: Log = []
        original = Part.call_on

        def noted(part: Part, inputs: Any) -> Any:
            log.append((part.call.id, inputs, original(part, inputs)))
            return log[-1][2]

        monkeypatch.setattr(Part, "call_on", noted)
        flow = Flow()
        for number in order:
            flow.run(parts.good[number])
        return log

    return run


def place(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def test_an_output_is_the_input_of_the_next(ran: Callable[..., Log]) -> None:
    (_, first, made), (_, second, again), (_, third, _) = ran([linear(0), relu(1)], [0, 1, 0])
    assert place(second.args[0]) == place(made) != place(first.args[0])
    assert place(third.args[0]) == place(again) == place(made)  # relu_ works in place
    assert place(third.args[1]) != place(first.args[1])  # the weights of another layer
    assert torch.equal(again, made) and float(made.min()) == 0


def test_its_numbers_arrive(ran: Callable[..., Log]) -> None:
    (_, first, made), (_, second, again) = ran([linear(0), linear(1)], [0, 1])
    assert torch.equal(again, made @ second.args[1])
    assert torch.equal(made, first.args[0] @ first.args[1])


@pytest.mark.parametrize(
    "other",
    [
        relu(1, (8 * M, N)),
        relu(1, (M - 1, N)),
        call("aten::relu_", tensor(M, N, dtype="bfloat16"), id=1),
        call("aten::relu_", tensor(2 * M, N, dtype="bfloat16"), id=1),
        call("aten::abs_", tensor(M, N, dtype="int32"), id=1),
    ],
    ids=["larger", "smaller, of its kind", "half", "as large, of another dtype", "integers"],
)
def test_only_what_is_of_its_kind_and_has_room(other: Call, ran: Callable[..., Log]) -> None:
    (_, _, made), (_, inputs, _) = ran([linear(0), other], [0, 1])
    assert (place(inputs.args[0]) == place(made)) == (other.args[0].value == relu(1, (M - 1, N)).args[0].value)


def test_the_second_output_is_the_second_input(ran: Callable[..., Log]) -> None:
    split = call("aten::aminmax", tensor(M, N), id=0).model_copy(update={"args": linear(0).args[:1]})
    add = call("aten::add.Tensor", tensor(1), tensor(1, storage=1), id=1)
    (_, _, (low, high)), (_, inputs, _) = ran([split, add], [0, 1])
    assert [place(one) for one in inputs.args[:2]] == [place(low), place(high)]


def test_parameters_and_caches_stay(ran: Callable[..., Log]) -> None:
    square = call("aten::relu", tensor(N, N), id=0)
    (_, _, made), (_, inputs, _) = ran([square, linear(1)], [0, 1])
    assert place(inputs.args[1]) != place(made)

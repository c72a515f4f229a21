"""What a Call writes lies where the next one reads, while a Program is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import call, tensor
from programs import M, N, linear, relu

from kcap.replay.group.peers import Alone
from kcap.replay.program.flow import NOT_HANDED_ON, Flow, has_lost_numbers, part_losers, set_apart
from kcap.replay.program.prepared import Activations, PreparedCall, PreparedCalls
from kcap.replay.rebuild.memory import Target
from kcap.replay.rebuild.operators import resolve_operator
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.schemas.derive.bound_call import ReplayRule, bind_call, replay_rule_for
from kcap.schemas.recording.recording import Argument, Call

Write = Callable[..., Path]
Log = list[tuple[Any, Any]]  # the inputs of each invocation, and what it returned


class Ran:
    def __init__(self, log: Log, flow: Flow) -> None:
        self.log, self.flow = log, flow


@pytest.fixture
def ran(recorded: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Call], list[int]], Ran]:
    """Runs `order` in one Flow."""

    def run(calls: list[Call], order: list[int], before: Callable[[PreparedCalls], None] = lambda _: None) -> Ran:
        parts = PreparedCalls(Rebuilder("cpu", "cpu", recorded(calls)), {n: order.count(n) for n in order}, {})
        before(parts)
        log: Log = []
        original = PreparedCall.call_on

        def noted(part: PreparedCall, inputs: Any) -> Any:
            log.append((inputs, original(part, inputs)))
            return log[-1][1]

        monkeypatch.setattr(PreparedCall, "call_on", noted)
        flow = Flow(parts.activations, checked=True)
        for number in order:
            flow.run(parts.good[number])
        return Ran(log, flow)

    return run


def place(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def into(id: int, *given: tuple[str, int], operator: str = "aten::add.out") -> Call:
    """Adds the first two, into the one that is called `out`; each is [M, N] and has the storage numbered."""
    args = [Argument(name=name, value=tensor(M, N, storage=storage), keyword=name == "out") for name, storage in given]
    return call(operator, id=id).model_copy(update={"args": args})


def test_an_output_is_the_input_of_the_next(ran: Callable[..., Ran]) -> None:
    (first, made), (second, again), (third, _) = ran([linear(0), relu(1)], [0, 1, 0]).log
    assert place(second.args[0]) == place(made) != place(first.args[0])
    assert place(third.args[0]) == place(again) == place(made)  # relu_ works in place
    assert place(third.args[1]) != place(first.args[1])  # the weights of another layer
    assert torch.equal(again, made) and float(made.min()) == 0


def test_its_numbers_arrive(ran: Callable[..., Ran]) -> None:
    (first, made), (second, again) = ran([linear(0), linear(1)], [0, 1]).log
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
def test_only_what_is_of_its_kind_and_has_room(other: Call, ran: Callable[..., Ran]) -> None:
    (_, made), (inputs, _) = ran([linear(0), other], [0, 1]).log
    assert (place(inputs.args[0]) == place(made)) == (other.args[0].value == relu(1, (M - 1, N)).args[0].value)


def test_the_first_read_was_written_last(ran: Callable[..., Ran]) -> None:
    add = into(1, ("self", 0), ("other", 1), ("out", 2))
    (_, one), (_, two), (inputs, _) = ran([linear(0), add], [0, 0, 1]).log
    assert [place(each) for each in inputs.args[:2]] == [place(two), place(one)]


def test_what_is_only_written_goes_where_nothing_is_read_and_is_read_next(ran: Callable[..., Ran]) -> None:
    add = into(0, ("self", 0), ("other", 1), ("out", 2))
    log = ran([add, relu(1)], [0, 1, 0, 0]).log
    for inputs, _ in (log[0], log[2], log[3]):
        assert len({place(each) for each in (*inputs.args, *inputs.kwargs.values())}) == 3
    assert place(log[1][0].args[0]) == place(log[0][0].kwargs["out"]) == place(log[2][0].args[0])


def test_what_an_operator_adds_to_is_read(ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's expansion adds to the product that was written just before."""
    monkeypatch.setattr(ReplayRule, "added_to", ("out",))
    add = into(1, ("self", 0), ("other", 1), ("out", 2))
    (_, one), (_, two), (_, three), (inputs, _) = ran([linear(0), add], [0, 0, 0, 1]).log
    assert [place(each) for each in (*inputs.args, inputs.kwargs["out"])] == [place(three), place(two), place(one)]
    assert replay_rule_for("triton::_lora_expand_kernel").added_to == ("out_ptr",)


def test_the_second_output_is_read_second(ran: Callable[..., Ran]) -> None:
    split = call("aten::aminmax", tensor(M, N), id=0).model_copy(update={"args": linear(0).args[:1]})
    add = call("aten::add.Tensor", tensor(1), tensor(1, storage=1), id=1)
    (_, (low, high)), (inputs, _) = ran([split, add], [0, 1]).log
    assert [place(one) for one in inputs.args[:2]] == [place(low), place(high)]


def test_parameters_and_caches_stay(ran: Callable[..., Ran]) -> None:
    square = call("aten::relu", tensor(N, N), id=0)
    (_, made), (inputs, _) = ran([square, linear(1)], [0, 1]).log
    assert place(inputs.args[1]) != place(made)


def test_numbers_keep_their_size_through_many_layers(ran: Callable[..., Ran]) -> None:
    found = ran([linear(0)], [0] * 40)
    assert 1e-6 < float(found.log[-1][1].abs().mean()) < 1e6
    assert found.flow.loser is None


@pytest.mark.parametrize(
    ("value", "is_lost"), [(0.0, True), (1e30, True), (float("nan"), True), (1e-25, True), (-3.0, False), (2e4, False)]
)
def test_what_is_lost_is_told_by_the_numbers_alone_and_not_by_what_lies_behind_them(
    value: float, is_lost: bool
) -> None:
    buffer = torch.randn(1 << 18, dtype=torch.bfloat16).view(torch.uint8)  # as large as the next power of two
    buffer[: 2 * 3 * 14336].view(torch.bfloat16).fill_(value)
    assert has_lost_numbers(buffer[: 2 * 3 * 14336], ("cpu", "bfloat16", 1 << 19)) is is_lost
    assert not has_lost_numbers(buffer[:0], ("cpu", "bfloat16", 64))


def test_zeros_that_a_call_fills_in_are_not_lost(ran: Callable[..., Ran]) -> None:
    found = ran([relu(0), call("aten::zero_", tensor(M, N), id=1)], [1, 0])
    assert not found.log[1][0].args[0].any() and found.flow.loser is None


def test_what_is_copied_over_is_not_read(ran: Callable[..., Ran]) -> None:
    copy = call("aten::copy_", tensor(M, N), tensor(M, N, storage=1), id=1)
    (_, made), (inputs, _), (after, _) = ran([linear(0), copy, relu(2)], [0, 1, 2]).log
    assert place(inputs.args[1]) == place(made) != place(inputs.args[0]) == place(after.args[0])


def test_memory_of_the_host_is_each_calls_own() -> None:
    """As it may have to be pinned."""
    copied = call("aten::copy_", tensor(M, N, device="cuda:0"), tensor(M, N, storage=1, device="cpu"))
    bound = bind_call(copied, None, resolve_operator(copied.operator).schema, lambda _: None)
    places = Activations().slots(bound, Target("cuda:0", "cuda"), frozenset())
    assert [key[0] for key in places] == ["cuda:0"]


@pytest.mark.parametrize("factor", [1e5, 1e-5])
def test_numbers_that_are_lost_are_seen(factor: float, ran: Callable[..., Ran]) -> None:
    def spoil(parts: PreparedCalls) -> None:
        for inputs in parts.all[0].sets:
            inputs.args[1].mul_(factor)

    assert ran([linear(0)], [0] * 12, spoil).flow.loser is not None


def test_numbers_that_nobody_reads_may_be_anything(ran: Callable[..., Ran]) -> None:
    log = call("aten::log", tensor(M, 2 * N), id=1)  # of negative numbers
    assert ran([linear(0), log], [0, 1, 0]).flow.loser is None
    assert ran([linear(0), call("aten::log", tensor(M, N), id=1)], [0, 1, 0]).flow.loser is not None


def test_what_a_call_set_apart_writes_is_its_own(ran: Callable[..., Ran]) -> None:
    """In place and returned; what it reads is still what the others wrote."""

    def separate(parts: PreparedCalls) -> None:
        for number in (1, 2):
            set_apart(parts.all[number])

    log = ran([linear(0), relu(1), linear(2)], [0, 1, 2, 0], separate).log
    (_, made), (inplace, _), (second, apart), (last, _) = log
    assert place(inplace.args[0]) not in {place(made), place(second.args[0])}
    assert place(second.args[0]) == place(made) == place(last.args[0]) != place(apart)


def test_only_calls_that_lose_numbers_are_set_apart(recorded: Write) -> None:
    calls = [linear(0), call("aten::exp_", tensor(M, N), id=1), call("aten::log", tensor(M, N), id=2), relu(3)]
    parts = PreparedCalls(Rebuilder("cpu", "cpu", recorded(calls)), dict.fromkeys(range(4), 2), {})
    parts.all[0].sets = [replace(one, args=[one.args[0], one.args[1].mul_(30)]) for one in parts.all[0].sets]
    order = [0, 1, 2, 3] * 2
    restore, notes = part_losers(order, parts, Alone("cpu"))
    assert [number for number, part in parts.all.items() if part.apart] == [1, 2]
    assert notes == [NOT_HANDED_ON + "aten::exp_, aten::log"]
    flow = Flow(parts.activations, checked=True)
    restore()
    for number in order:
        flow.run(parts.all[number])
    assert flow.loser is None

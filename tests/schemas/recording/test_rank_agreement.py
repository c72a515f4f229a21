"""Ranks that must agree: what counts as the same, what differs, and who need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kcap.schemas.recording.rank_agreement import MOST, disagreements
from kcap.schemas.recording.recording import Argument, Call, Count, Launch, Program, Step
from kcap.schemas.recording.records import Difference, Disagreement, Rank
from kcap.schemas.recording.values import Group, TensorSpec

X = TensorSpec((4, 8), "bfloat16")


def rank(number: int, group: Sequence[int] = (0, 1), **places: int) -> Rank:
    return Rank(rank=number, places=places, groups={"tp": list(group)} if group else {})


TWO = [rank(0), rank(1)]


def call(number: int, operator: str, *values: Any, **more: Any) -> Call:
    return Call(id=number, operator=operator, args=[Argument(value=value) for value in values], **more)


LINEAR, REDUCE, VIEW = call(0, "aten::mm", X), call(1, "vllm::all_reduce", X), call(2, "aten::view", X, work=False)
CALLS = [LINEAR, REDUCE, VIEW]


def program(number: int, calls: Sequence[int], counts: dict[int, int], phase: Any = "decode", **more: Any) -> Program:
    ran = [Count(phase=phase, rank=on, count=times) for on, times in counts.items()]
    return Program(id=number, calls=list(calls), counts=ran, **more)


def test_ranks_that_ran_the_same_agree() -> None:
    assert disagreements(TWO, CALLS, [program(0, [0, 1], {0: 7, 1: 7})], []) == []


def test_a_call_that_one_rank_lacks_is_named_with_both_counts() -> None:
    programs = [program(0, [0, 1, 1], {0: 7}), program(1, [0, 1], {1: 7})]
    (disagreement,) = disagreements(TWO, CALLS, programs, [])
    lacking = Difference(operator="vllm::all_reduce", signature="bf16[4, 8]", counts=[14, 7])
    assert disagreement == Disagreement(ranks=[0, 1], phase="decode", steps=[7, 7], calls=[lacking])
    assert disagreement.text == (
        "ranks 0 and 1 must agree and did not in 7 and 7 decode steps: vllm::all_reduce bf16[4, 8] 14 and 7 times"
    )


def test_only_the_steps_that_differ_are_counted() -> None:
    programs = [program(0, [0, 1], {0: 5, 1: 7}), program(1, [0, 1, 1], {0: 2})]
    (disagreement,) = disagreements(TWO, CALLS, programs, [])
    assert (disagreement.steps, [one.counts for one in disagreement.calls]) == ([2, 2], [[4, 2]])


def test_another_shape_is_another_call() -> None:
    narrow = call(3, "aten::mm", TensorSpec((4, 6), "bfloat16"))
    (disagreement,) = disagreements(TWO, [*CALLS, narrow], [program(0, [0], {0: 1}), program(1, [3], {1: 1})], [])
    assert [(one.signature, one.counts) for one in disagreement.calls] == [
        ("bf16[4, 8]", [1, 0]),
        ("bf16[4, 6]", [0, 1]),
    ]


def test_another_order_is_said_without_a_call() -> None:
    (disagreement,) = disagreements(TWO, CALLS, [program(0, [0, 1], {0: 1}), program(1, [1, 0], {1: 1})], [])
    assert disagreement.calls == [] and "the same in another order" in disagreement.text


def own(value: Any) -> tuple[Call, Call]:
    """One Call each for two ranks, which differs in a value of their own."""
    return call(0, "aten::all_reduce", X, value[0]), call(1, "aten::all_reduce", X, value[1])


@pytest.mark.parametrize("value", [(Group(2, 0, "tp"), Group(2, 1, "tp")), (0, 256)], ids=["group", "vocabulary"])
def test_what_is_each_ranks_own_is_no_difference(value: Any) -> None:
    assert disagreements(TWO, own(value), [program(0, [0], {0: 3}), program(1, [1], {1: 3})], []) == []


def test_a_compiled_kernel_with_its_ranks_own_constants_is_no_difference() -> None:
    kernels = [
        call(n, f"triton::embed.s{n:08x}", X, launch=Launch(function="embed", kernel=f"{n}.py")) for n in range(2)
    ]
    assert disagreements(TWO, kernels, [program(0, [0], {0: 3}), program(1, [1], {1: 3})], []) == []


def test_views_are_not_compared() -> None:
    assert disagreements(TWO, CALLS, [program(0, [0, 2], {0: 3}), program(1, [0], {1: 3})], []) == []


def test_what_a_graph_ran_is_compared_as_if_it_had_run_by_itself() -> None:
    graph = program(0, [0, 1], {0: 5, 1: 6}, kind="graph")  # its own counts are of no steps
    programs = [graph, program(1, [0], {0: 3}, graphs=[(1, 0)]), program(2, [0, 0, 1], {1: 3})]
    assert disagreements(TWO, CALLS, programs, []) == []
    turned = program(1, [0], {0: 3}, graphs=[(0, 0)])
    assert disagreements(TWO, CALLS, [graph, turned, programs[2]], []) != []


def test_stages_of_a_pipeline_and_replicas_need_not_agree() -> None:
    programs = [program(0, [0], {0: 3}), program(1, [1], {1: 3})]
    for ranks in (
        [rank(0, ()), rank(1, ())],
        [rank(0, (0,)), rank(1, (1,))],
        [rank(0, dp=0), rank(1, dp=1)],  # attention in data parallel among the ranks of one tensor parallel group
    ):
        assert disagreements(ranks, CALLS, programs, []) == []


def test_each_group_is_compared_with_its_own_first_rank() -> None:
    ranks = [rank(n, (n // 2 * 2, n // 2 * 2 + 1)) for n in range(4)]
    programs = [program(0, [0], {0: 3, 1: 3, 3: 3}), program(1, [1], {2: 3})]
    assert [disagreement.ranks for disagreement in disagreements(ranks, CALLS, programs, [])] == [[2, 3]]


def step(index: int, on: int, ran: int, length: int) -> Step:
    return Step(index=index, rank=on, phase="decode", tokens=1, sequences=1, queries=[1], lengths=[length], program=ran)


def test_a_rank_that_died_is_compared_in_the_steps_that_both_list() -> None:
    whole = [program(0, [0], {0: 5, 1: 3})]
    steps = [step(n, on, 0, 10 + n) for on, last in ((0, 5), (1, 3)) for n in range(last)]
    assert disagreements(TWO, CALLS, whole, steps) == []
    different = [program(0, [0], {0: 5, 1: 2}), program(1, [0, 0], {1: 1})]
    changed = [one.model_copy(update={"program": 1}) if (one.rank, one.index) == (1, 2) else one for one in steps]
    (disagreement,) = disagreements(TWO, CALLS, different, changed)
    assert (disagreement.steps, [one.counts for one in disagreement.calls]) == ([1, 1], [[1, 2]])


def test_a_window_that_opened_a_step_later_makes_no_difference() -> None:
    """Steps are known by their batches: the numbers of two ranks' steps are apart then."""
    programs = [program(0, [0], {0: 1}), program(1, [1], {0: 2, 1: 2})]
    steps = [step(n, 0, min(n, 1), 10 + n) for n in range(3)] + [step(n, 1, 1, 11 + n) for n in range(2)]
    assert disagreements(TWO, CALLS, programs, steps) == []


def test_many_differences_are_counted_and_not_all_listed() -> None:
    many = [call(n, f"x::k{n}", X) for n in range(MOST + 5)]
    (disagreement,) = disagreements(TWO, many, [program(0, range(MOST + 5), {0: 1}), program(1, [], {1: 1})], [])
    assert (len(disagreement.calls), disagreement.more) == (MOST, 5)
    assert f"{MOST + 2} more Calls" in disagreement.text

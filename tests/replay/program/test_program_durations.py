"""Kernels of a Program's profile given to its invocations."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.program.durations import attribute_kernels, kernel_owners
from kcap.replay.timing.graphs import KernelRun

KERNELS = {0: {"norm": 1}, 1: {"split": 1, "reduce": 1}, 2: {"copy": 2}, 3: {}}


def names(order: list[int]) -> list[str]:
    return [name for call in order for name, times in KERNELS[call].items() for _ in range(times)]


@given(st.lists(st.sampled_from(sorted(KERNELS)), max_size=30))
def test_kernels_one_after_another_are_their_invocations(order: list[int]) -> None:
    found = kernel_owners(names(order), order, KERNELS)
    assert [order[place] for place in found if place is not None] == [
        c for c in order for _ in range(sum(KERNELS[c].values()))
    ]
    assert found == sorted(found)  # type: ignore[type-var]


def test_the_order_within_an_invocation_may_differ() -> None:
    assert kernel_owners(["norm", "reduce", "split"], [0, 1], KERNELS) == [0, 1, 1]


def test_a_kernel_that_no_call_told_of_has_no_owner_and_the_others_keep_theirs() -> None:
    order = [0, 1, 0, 1]
    seen = ["norm", "split", "reduce", "memset", "norm", "split", "reduce"]
    assert kernel_owners(seen, order, KERNELS) == [0, 1, 1, None, 2, 3, 3]


def test_a_kernel_after_the_last_one_has_no_owner() -> None:
    assert kernel_owners(["norm", "memset"], [0], KERNELS) == [0, None]


def test_another_kernel_than_alone_between_two_of_one_invocation_is_its_own() -> None:
    kernels = {0: {"a": 1, "b": 1, "c": 1}, 1: {"d": 1}}
    assert kernel_owners(["a", "x", "c", "d"], [0, 1], kernels) == [0, 0, 0, 1]


def test_a_kernel_that_did_not_run_moves_no_other() -> None:
    order = [0, 2, 1]
    assert kernel_owners(["norm", "split", "reduce"], order, KERNELS) == [0, 2, 2]


def test_nothing_seen_and_nothing_expected() -> None:
    assert kernel_owners([], [], KERNELS) == []
    assert kernel_owners(["norm"], [], KERNELS) == [None]
    assert kernel_owners([], [0, 1], KERNELS) == []


def test_each_run_tells_the_time_of_each_invocation() -> None:
    kernels = (("norm", 1.0), ("split", 2.0), ("reduce", 4.0))
    runs = [[KernelRun(name, 0, us + more, 0) for name, us in kernels] for more in (0.0, 8.0)]
    assert attribute_kernels(runs, [0, 1], {0: KERNELS[0], 1: KERNELS[1]}).runs == [[1.0, 6.0], [9.0, 22.0]]
    (run,) = attribute_kernels(runs[:1], [3, 0, 1], KERNELS).runs
    assert math.isnan(run[0]) and run[1:] == [1.0, 6.0]

"""What is told of steps with and without Solutions: a change that is there, one that is not, and one nobody ran."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.apply.arms import CONTROL, ENGINE, Schedule, TimedStep
from kcap.bench.apply.comparison import compare, half_interval, student_t
from kcap.bench.apply.quality import compare_tokens
from kcap.commands.ab import Measured, compare_fresh
from kcap.schemas.recording.records import Call, Count
from kcap.schemas.results.plan import Plan, PlanMachine, Replacement

SCHEDULE = Schedule(plans=1, block=4, seed=3)
CALL = Call(id=7, operator="aten::mm.out", counts=[Count(phase="decode", count=10)])
REPLACEMENT = Replacement(
    call=CALL, seam="operator", definition="gemm", solution="0" * 64, workloads=[], inputs=[], outputs=[],
    engine_us={"decode": 9.0}, solution_us=4.0,
)  # fmt: skip
PLAN = Plan.model_construct(replacements=[REPLACEMENT], solutions={})


def steps(count: int, saved: float, uses: int = 2, drift: float = 0.0, noise: float = 1.0) -> list[TimedStep]:
    """Decodes of 8 sequences, of which those with Solutions take `saved` less; all get slower by `drift` a step."""
    draw = random.Random(0)
    made = []
    for index in range(count):
        arm, first = SCHEDULE.arm(index)
        us = 1000.0 + drift * index + draw.gauss(0, noise) - (saved if arm == 0 else 0.0) + 500.0 * first
        ran = [uses] if arm == 0 else [0]
        made.append(
            TimedStep(index=index, arm=arm, phase="decode", sequences=8, tokens=8, us=us, uses=ran, first=first)
        )
    return made


def test_a_gain_is_found_beside_what_was_predicted() -> None:
    (found,) = compare(PLAN, 0, steps(600, saved=10.0, drift=0.1), SCHEDULE)
    assert found.solutions is not None and found.control is not None and found.solutions.half_interval_us is not None
    assert found.solutions.us == pytest.approx(-10.0, abs=found.solutions.half_interval_us + 0.5)
    assert found.predicted_us == pytest.approx(-2 * 5.0)
    assert found.held == 1.0


def test_the_control_differs_by_chance_alone() -> None:
    (found,) = compare(PLAN, 0, steps(600, saved=10.0), SCHEDULE)
    assert found.control is not None and abs(found.control.us) < 1.0


def test_what_no_step_ran_is_told_as_not_held_and_never_as_a_gain_of_nothing() -> None:
    (found,) = compare(PLAN, 0, steps(600, saved=0.0, uses=0), SCHEDULE)
    assert found.held == 0.0 and found.predicted_us == 0.0


def test_kinds_of_steps_are_not_mixed() -> None:
    mixed = [
        step.model_copy(update={"sequences": 8 + step.index % 2, "us": step.us + 1000 * (step.index % 2)})
        for step in steps(600, saved=10.0)
    ]
    found = compare(PLAN, 0, mixed, SCHEDULE)
    assert [one.sequences for one in found] == [9, 8]  # which takes longer comes first
    for one in found:
        assert one.solutions is not None and one.solutions.us == pytest.approx(-10.0, abs=1.0)


def test_the_first_step_of_a_block_stays_out() -> None:
    (found,) = compare(PLAN, 0, steps(120, saved=0.0), SCHEDULE)
    assert found.steps == 120 * 3 // 4
    assert found.engine_us == pytest.approx(1000.0, abs=1.0)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 1 << 31))
def test_as_many_blocks_as_arms_have_one_of_each(plans: int, block: int, seed: int) -> None:
    schedule = Schedule(plans, block, seed)
    size = (2 + plans) * block
    for group in (0, 1):
        drawn = [schedule.arm(index) for index in range(group * size, (group + 1) * size)]
        assert Counter(arm for arm, _ in drawn) == dict.fromkeys([ENGINE, CONTROL, *range(plans)], block)
        assert sum(first for _, first in drawn) == 2 + plans
        assert {schedule.group(index) for index in range(group * size, (group + 1) * size)} == {group}


def test_intervals_are_students() -> None:
    assert half_interval([1.0, 2.0]) is None
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert student_t(1000) == 1.980 and student_t(11) == 2.228


def test_a_plan_of_a_solution_that_was_changed_is_refused() -> None:
    from applied_plans import python_solution

    solution = python_solution("gemm", "def run(a, b):\n    return a @ b\n")
    with pytest.raises(ValueError, match="is not the Solution that was judged"):
        Plan(
            kcap="0", recording="", recording_sha256="", machine=PlanMachine(device="cpu"),
            solutions={"0" * 64: solution}, replacements=[REPLACEMENT],
        )  # fmt: skip


def engine(us: float, *generated: list[int]) -> Measured:
    step = TimedStep(index=0, arm=0, phase="decode", sequences=1, tokens=1, us=us, uses=[], first=False)
    return Measured([step], [], generated=list(generated))


def test_fresh_engines_are_compared_pair_by_pair() -> None:
    same, other = [1, 2, 3, 4], [1, 2, 9, 4]
    engines = [(-1, engine(100.0, same, same)), (0, engine(90.0, same, other))]
    engines += [(0, engine(95.0, same, same)), (-1, engine(100.0, same, same)), (-1, engine(7.0))]
    found = compare_fresh(engines)
    assert found is not None and found.tokens is not None and found.control is not None
    assert (found.engine_us, found.solutions_us) == ([100.0, 100.0], [90.0, 95.0])
    assert found.median_ratio == pytest.approx(0.925) and found.half_interval is None
    assert (found.tokens.requests, found.tokens.same, found.tokens.agreed) == (4, 0.75, 14 / 16)
    assert (found.control.requests, found.control.same, found.control.agreed) == (2, 1.0, 1.0)


def test_tokens_of_a_server_are_not_compared() -> None:
    found = compare_fresh([(-1, engine(100.0)), (0, engine(90.0))])
    assert found is not None and found.tokens is None and found.control is None
    assert compare_fresh([(-1, engine(100.0))]) is None


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1), st.data())
def test_answers_agree_up_to_their_first_difference(ours: list[list[int]], data: st.DataObject) -> None:
    theirs = [data.draw(st.lists(st.integers(0, 2), max_size=4)) for _ in ours]
    found = compare_tokens([(ours, theirs)])
    told = [(a, b) for a, b in zip(ours, theirs, strict=True) if a or b]
    if found is None:
        assert not told
        return
    assert found.requests == len(told)
    assert found.same == pytest.approx(sum(a == b for a, b in told) / len(told))
    common = [max(n for n in range(5) if a[:n] == b[:n] and n <= min(len(a), len(b))) for a, b in told]
    assert found.agreed == pytest.approx(sum(common) / sum(max(len(a), len(b)) for a, b in told))

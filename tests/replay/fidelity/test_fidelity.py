"""Engine against replay, on steps written by hand: ratios, what is missing, the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import CALLS, in_a_row, judged, kernel, step, steps_of, times

from kcap.replay.fidelity.compare import NOT_COUNTED, NOT_REPLAYED, Provenance, ReplayedCall, compare
from kcap.replay.fidelity.engine import KindSteps
from kcap.replay.fidelity.run import fidelity_document
from kcap.replay.fidelity.verdict import Fidelity, KindFidelity, ProgramTime
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, WAITS_FOR_GPU

ENGINE = steps_of(
    step(*in_a_row((0, 50), (1, 30), (0, 50), (2, 10))),
    step(*in_a_row((0, 50), (1, 30), (0, 50), (2, 10))),
    gemm=4, flash=2, norm=2,
)  # fmt: skip
SAME = times({0: 50, 1: 30, 2: 10})


def violations(kind: KindFidelity) -> str:
    return "\n".join(kind.violations())


def test_a_row_is_of_one_step_and_of_all_invocations_in_it() -> None:
    gemm, flash, norm = compare(ENGINE, CALLS, times({0: 55, 1: 27, 2: 10}), "serving").rows
    assert (gemm.count, gemm.engine_us, gemm.replayed_us) == (2, 100, 110)
    assert (gemm.ratio, flash.ratio, norm.ratio) == (pytest.approx(1.1), pytest.approx(0.9), 1.0)
    assert (gemm.share, flash.share, norm.share) == (100 / 140, 30 / 140, 10 / 140)


def test_a_call_of_several_kernels_is_their_sum() -> None:
    engine = steps_of(step(kernel(0, 40), kernel(0, 10), kernel(0, 40), kernel(0, 10)), gemm=2)
    (row,) = compare(engine, CALLS, times({0: 50}), "serving").rows
    assert (row.engine_us, row.ratio) == (100, 1)


def test_steps_that_differ_are_averaged_by_their_own_counts() -> None:
    engine = steps_of(step(kernel(0, 10)), step(kernel(0, 10), kernel(0, 10), kernel(0, 10)), gemm=4)
    (row,) = compare(engine, CALLS, times({0: 10}), "serving").rows
    assert (row.count, row.engine_us, row.replayed_us) == (2, 20, 20)


def test_a_kernel_of_no_call_and_a_call_that_was_not_replayed_are_rows() -> None:
    engine = steps_of(step(*in_a_row((0, 90), (None, 6), (1, 4))), gemm=1, flash=1)
    found = compare(engine, CALLS, {**times({0: 90}), 1: ReplayedCall(reason="skipped: no library")}, "serving")
    assert [(one.name, one.reason, one.share) for one in found.missing] == [
        ("lost", "no recorded call", 0.06),
        ("lib::flash", "skipped: no library", 0.04),
    ]
    assert (found.engine_us, found.replayed_us, found.missing_us) == (100, 90, 10)


@pytest.mark.parametrize(("counts", "reason"), [({"gemm": 1}, NOT_COUNTED), ({"gemm": 1, "flash": 1}, NOT_REPLAYED)])
def test_a_call_without_a_count_or_a_replay_is_missing(counts: dict[str, int], reason: str) -> None:
    engine = steps_of(step(*in_a_row((0, 90), (1, 10))), **counts)
    (missing,) = compare(engine, CALLS, times({0: 90}), "serving").missing
    assert (missing.name, missing.reason, missing.engine_us) == ("lib::flash", reason, 10)


def test_what_only_the_replay_ran_counts_against_it() -> None:
    engine = steps_of(step(*in_a_row((0, 100))), gemm=1, norm=1)
    found = compare(engine, CALLS, times({0: 100, 2: 8}), "serving")
    assert [(row.call.id, row.ratio) for row in found.rows] == [(0, 1), (2, None)]
    assert found.error == pytest.approx(0.08)


def test_what_costs_the_gpu_nothing_on_both_sides_is_no_row() -> None:
    engine = steps_of(step(*in_a_row((0, 100))), gemm=1, norm=1)
    found = compare(engine, CALLS, {**times({0: 100}), 2: ReplayedCall(reason="the host's work")}, "serving")
    assert [row.call.id for row in found.rows] == [0]
    assert found.missing == []


def test_a_kernel_of_another_name_is_marked_and_one_that_was_compiled_here_is_not() -> None:
    other = {number: ReplayedCall(one.us, "", frozenset(["renamed"])) for number, one in SAME.items()}
    assert [row.other for row in compare(ENGINE, CALLS, other, "serving").rows] == [True] * 3
    launched = {n: call.model_copy(update={"launch": {"function": "f"}}) for n, call in CALLS.items()}
    assert not any(row.other for row in compare(ENGINE, launched, other, "serving").rows)
    assert not any(row.other for row in compare(ENGINE, CALLS, SAME, "serving").rows)


def test_a_replay_that_is_too_long_does_not_make_up_for_what_is_missing() -> None:
    engine = steps_of(step(*in_a_row((0, 96), (None, 4))), gemm=1)
    found = compare(engine, CALLS, times({0: 100}), "serving")
    assert found.replayed_us == found.engine_us == 100
    assert found.error == pytest.approx(0.08)


@pytest.mark.parametrize(("us", "inside"), [(0.9, True), (1.1, True), (0.8999, False), (1.1001, False)])
def test_a_kernel_may_be_ten_percent_off(us: float, inside: bool) -> None:
    engine = steps_of(step(*in_a_row((0, 90), (1, 10))), gemm=1, flash=1)
    kind = judged(engine, times({0: 90, 1: 10 * us}))
    assert (violations(kind) == "") is inside
    assert inside or "lib::flash (10.0% of the time)" in violations(kind)


@pytest.mark.parametrize(("flash", "inside"), [(2.0, True), (2.01, False)])
def test_a_kernel_of_two_percent_of_the_time_is_not_judged_alone(flash: float, inside: bool) -> None:
    engine = steps_of(step(*in_a_row((0, 100 - flash), (1, flash))), gemm=1, flash=1)
    assert (violations(judged(engine, times({0: 100 - flash, 1: flash * 2}))) == "") is inside


@pytest.mark.parametrize(("us", "inside"), [(95, True), (105, True), (94.99, False), (105.01, False)])
def test_the_total_may_be_five_percent_off(us: float, inside: bool) -> None:
    kind = judged(steps_of(step(*in_a_row((0, 100))), gemm=1), times({0: us}))
    assert (violations(kind) == "") is inside
    assert Fidelity([kind]).holds is inside


@pytest.mark.parametrize(("us", "inside"), [(2, True), (2.1, False)])
def test_what_is_missing_is_judged_as_a_kernel_is(us: float, inside: bool) -> None:
    kind = judged(steps_of(step(*in_a_row((0, 100 - us), (None, us))), gemm=1), times({0: 100 - us}))
    assert (violations(kind) == "") is inside
    assert inside or "lost (2.1% of the time) is missing: no recorded call" in violations(kind)


@pytest.mark.parametrize(("us", "inside"), [(126, True), (154, True), (125.9, False), (154.1, False)])
def test_the_program_may_be_ten_percent_off_the_span(us: float, inside: bool) -> None:
    assert (violations(judged(ENGINE, SAME, program=ProgramTime(us))) == "") is inside


@pytest.mark.parametrize("note", [WAITS_FOR_GPU, BLOCKER_TIMED_OUT])
@pytest.mark.parametrize(("us", "inside"), [(126, True), (125.9, False), (1400, True)])
def test_one_that_waits_for_its_host_may_be_longer(us: float, inside: bool, note: str) -> None:
    kind = judged(ENGINE, SAME, program=ProgramTime(us, provenance=Provenance(notes=("a", note))))
    assert (violations(kind) == "") is inside


def test_one_state_that_holds_is_enough_and_none_names_both() -> None:
    off = times({0: 50, 1: 30, 2: 20})
    assert violations(judged(ENGINE, off, SAME)) == ""
    assert violations(judged(ENGINE, SAME, off)) == ""
    both = violations(judged(ENGINE, off, off))
    assert "serving: lib::norm" in both
    assert "Program: lib::norm" in both


@pytest.mark.parametrize(
    ("alone", "inside", "holds_by", "total_by"),
    [
        (10, 10, ["serving", "Program"], "serving"),
        (20, 10, ["Program"], "Program"),
        (10, 20, ["serving"], "serving"),
        (30, 20, [], "Program"),
        (20, 30, [], "serving"),
    ],
)
def test_the_document_names_the_states_behind_the_verdict_and_the_total(
    alone: float, inside: float, holds_by: list[str], total_by: str
) -> None:
    kind = judged(ENGINE, times({0: 50, 1: 30, 2: alone}), times({0: 50, 1: 30, 2: inside}))
    made = fidelity_document(Fidelity([kind, kind]))
    assert (made["kinds"][0]["holds_by"], made["kinds"][0]["total_by"]) == (holds_by, total_by)
    assert made["total_by"] == {total_by: 2}
    assert made["replayed_us"] == 4 * made["kinds"][0]["states"][total_by]["replayed_us"]


def test_two_states_do_not_hold_by_halves() -> None:
    """Each has a kernel that is right where the other's is wrong."""
    first, second = times({0: 50, 1: 30, 2: 20}), times({0: 50, 1: 60, 2: 10})
    assert violations(judged(ENGINE, first, second)) != ""


def test_a_program_that_was_not_replayed_and_a_span_that_is_not_known_do_not_hold() -> None:
    assert "was not replayed as a whole: out of memory" in violations(
        judged(ENGINE, SAME, program=ProgramTime(None, "out of memory"))
    )
    old = steps_of(step(kernel(0, 100)), gemm=1)
    assert "span is not known" in violations(judged(old, times({0: 100})))


def test_kinds_weigh_as_often_as_they_were_profiled() -> None:
    often = judged(steps_of(*[step(*in_a_row((0, 100)))] * 9, gemm=9), times({0: 104}))
    once = judged(steps_of(step(*in_a_row((0, 100))), gemm=1), times({0: 95}))
    found = Fidelity([often, once])
    assert (found.engine_us(), found.replayed_us()) == (1000, 9 * 104 + 95)
    assert found.error == pytest.approx(0.031)
    assert found.holds


def test_one_kind_outside_is_enough_whatever_the_rest_adds_up_to() -> None:
    kinds = [judged(steps_of(step(*in_a_row((0, 100))), gemm=1), times({0: us})) for us in (92, 108)]
    assert Fidelity(kinds).error == pytest.approx(0)
    assert not Fidelity(kinds).holds


call_times = st.dictionaries(st.sampled_from([0, 1, 2]), st.floats(0.1, 1e6), min_size=1)


@settings(deadline=None)
@given(call_times, st.integers(1, 5), st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 64)))
def test_a_replay_that_equals_the_engine_is_right_whatever_the_counts(
    us: dict[int, float], steps: int, counts: dict[int, int]
) -> None:
    kernels = in_a_row(*[(call, time) for call, time in us.items() for _ in range(counts.get(call, 1))])
    known = steps_of(step(*kernels))
    engine = KindSteps(known.kind, [step(*kernels)] * steps, known.invocations)
    engine.invocations.update({call: steps * counts.get(call, 1) for call in us})
    kind = judged(engine, times(us))
    assert [row.ratio for row in kind.serving.rows] == [pytest.approx(1)] * len(us)
    assert sum(row.share for row in kind.serving.rows) == pytest.approx(1)
    assert Fidelity([kind]).holds


@settings(deadline=None)
@given(call_times, st.sets(st.sampled_from([0, 1, 2])), st.floats(0, 1e6))
def test_no_time_of_the_engine_is_lost(us: dict[int, float], replayed: set[int], lost: float) -> None:
    engine = steps_of(step(*in_a_row(*us.items(), (None, lost))))
    engine.invocations.update(dict.fromkeys(us, 1))
    found = compare(engine, CALLS, times({call: us[call] for call in replayed & us.keys()}), "serving")
    assert found.engine_us == pytest.approx(engine.gpu_us)
    assert len(found.rows) + len(found.missing) == len(us) + 1
    assert sum(row.share for row in [*found.rows, *found.missing]) == pytest.approx(1)


def test_the_document_has_what_the_table_has() -> None:
    made = fidelity_document(Fidelity([judged(ENGINE, times({0: 50, 1: 30, 2: 20}))]))
    assert made["holds"] is False
    (kind,) = made["kinds"]
    assert (kind["phase"], kind["steps"], kind["span"]["own_us"]) == ("decode", 2, 140)
    serving = kind["states"]["serving"]
    assert [(row["call"], row["within"]) for row in serving["kernels"]] == [(0, True), (1, True), (2, False)]
    assert kind["program"]["over_span"] == 1


@pytest.mark.parametrize(("us", "inside"), [(100, True), (70, True), (64, False), (106, False)])
def test_kernels_side_by_side_may_be_replayed_in_the_time_that_they_took_together(us: float, inside: bool) -> None:
    """gemm from 0 to 60, flash from 30 to 70: 100 in all, in 70."""
    engine = steps_of(
        step(kernel(0, 60, 0.0, launched_us=-9.0), kernel(1, 40, 30.0, launched_us=-9.0)), gemm=1, flash=1
    )
    state = judged(engine, times({0: us - 30, 1: 30})).serving
    assert [row.beside for row in state.rows] == [0.5, 0.75] and state.overlap_us == 30
    assert any(state.violations()) is not inside


def test_kernels_of_one_call_that_overlap_are_judged() -> None:
    engine = steps_of(step(kernel(0, 60, 0.0, launched_us=-9.0), kernel(0, 40, 30.0, launched_us=-9.0)), gemm=1)
    (row,) = judged(engine, times({0: 80})).serving.rows
    assert row.beside == 0 and row.judged and not row.within

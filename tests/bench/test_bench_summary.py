"""What Outcomes come to: no mean over a part, nothing saved where nothing passed, shares that are of the whole."""

from __future__ import annotations

import math
import shlex
from collections import Counter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged import COUNTS, write_judged, write_solution

from kcap.bench.run.output import read_run
from kcap.bench.run.summary.baseline import Measured, References, count_doubtful, measured_baseline, why_not_comparable
from kcap.bench.run.summary.score import best_scores, savings, score_key, score_solutions
from kcap.errors import CallError
from kcap.replay.datasets.workloads import workload_weights
from kcap.schemas.flashinfer.dataset import WorkloadCount
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.recording.records import Call, Count
from kcap.schemas.recording.signature import call_key
from kcap.schemas.results import measurement as measurements_file
from kcap.schemas.results.measurement import Measurement
from kcap.schemas.results.outcome import STATUSES, Clocked, Outcome

EVERY = {"scale": ["s1", "s2"]}
WEIGHTS = {("scale", "s1"): Counter(decode=10), ("scale", "s2"): Counter(decode=30)}


def clocked(us):
    return Clocked(median_us=us, q1_us=us, q3_us=us)


def outcome(workload, us=None, reference=20.0, status="PASSED", solution="a", **more):
    times = {"time": clocked(us), "reference": clocked(reference)} if us is not None else {}
    return Outcome(
        solution=solution, author="ann", definition="scale", workload=workload, status=status, **times, **more
    )


def one_score(*outcomes, workloads=EVERY):
    (only,) = score_solutions(outcomes, workloads, WEIGHTS)
    return only


def test_the_geometric_mean_counts_each_workload_once_and_the_other_by_its_counts():
    found = one_score(outcome("s1", us=10), outcome("s2", us=40))
    assert found.geometric_mean == pytest.approx(1.0)
    assert found.weighted == pytest.approx(20 * 40 / (10 * 10 + 30 * 40))


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "PASSED"])
def test_one_workload_that_did_not_pass_leaves_no_mean(status):
    found = one_score(outcome("s1", us=1), outcome("s2", status=status))
    assert (found.ranked, found.geometric_mean, found.weighted) == (False, None, None)


def test_a_time_that_stands_beside_another_status_is_no_speedup():
    found = one_score(outcome("s1", us=1), outcome("s2", us=1, status="REWARD_HACK"))
    assert (found.ranked, found.geometric_mean) == (False, None)


def test_workloads_that_were_never_judged_leave_no_mean():
    found = one_score(outcome("s1", us=1))
    assert (found.ranked, found.geometric_mean, found.judged, len(found.workloads)) == (False, None, 1, 2)


def test_outcomes_on_other_workloads_do_not_fill_up():
    found = one_score(outcome("s1", us=1), outcome("s3", us=1), outcome("s4", us=1))
    assert (found.ranked, len(found.outcomes)) == (False, 1)


@pytest.mark.parametrize(("us", "reference"), [(0.0, 20.0), (1.0, 0.0), (0.0, 0.0), (5e-324, 1e300)])
def test_times_of_zero_make_no_mean(us, reference):
    """Geometric means of zeros and infinities have let a Solution win that did nothing."""
    found = one_score(outcome("s1", us=us, reference=reference), outcome("s2", us=10))
    assert (found.ranked, found.geometric_mean, found.weighted) == (False, None, None)


def test_a_mean_of_many_small_speedups_does_not_underflow():
    names = [str(number) for number in range(2000)]
    found = one_score(*(outcome(name, us=20e3) for name in names), workloads={"scale": names})
    assert found.geometric_mean == pytest.approx(1e-3)


def test_a_definition_without_workloads_ranks_nobody():
    (found,) = score_solutions([outcome("gone", status="COMPILE_ERROR")], {"scale": []}, {})
    assert not found.ranked


def test_solutions_that_pass_everything_come_first_whatever_others_reach_elsewhere():
    slow = [outcome(uuid, us=19, solution="slow") for uuid in EVERY["scale"]]
    fast = [outcome(uuid, us=5, solution="fast") for uuid in EVERY["scale"]]
    partly = [outcome("s1", us=1e-3, solution="partly"), outcome("s2", solution="partly", status="TIMEOUT")]
    found = score_solutions([*partly, *slow, *fast], EVERY, WEIGHTS)
    assert [one.solution for one in found] == ["fast", "slow", "partly"]


def test_what_did_not_pass_saves_nothing():
    found = one_score(outcome("s1", us=10), outcome("s2", us=1, status="INCORRECT_NUMERICAL"))
    saved = savings(found, WEIGHTS, References())
    assert saved[ALL_PHASES].saved_us == pytest.approx(10 * (20 - 10))


def test_a_slower_solution_costs_time_and_is_nobodys_best():
    found = one_score(outcome("s1", us=30), outcome("s2", us=30))
    saved = savings(found, WEIGHTS, References())
    assert saved[ALL_PHASES].saved_us == pytest.approx(-400)
    assert best_scores([found], {score_key(found): saved}) == []


def test_the_best_of_a_definition_is_one_that_passed_everything():
    scores = score_solutions(
        [
            *(outcome(uuid, us=19, solution="whole") for uuid in EVERY["scale"]),
            outcome("s1", solution="partly", status="TIMEOUT"),
            outcome("s2", us=1e-3, solution="partly"),
        ],
        EVERY,
        WEIGHTS,
    )
    saved = {score_key(one): savings(one, WEIGHTS, References()) for one in scores}
    assert saved["scale/ann/partly"][ALL_PHASES].saved_us > saved["scale/ann/whole"][ALL_PHASES].saved_us
    assert [one.solution for one in best_scores(scores, saved)] == ["whole"]


statuses = st.sampled_from(STATUSES)
times = st.floats(0, 1e6)


@given(st.dictionaries(st.sampled_from(["s1", "s2"]), st.tuples(statuses, times, times)))
def test_no_outcomes_give_a_mean_that_is_not_a_number_or_savings_above_what_was_there(given_ones):
    ones = [outcome(name, us=us, reference=ref, status=status) for name, (status, us, ref) in given_ones.items()]
    for found in score_solutions(ones, EVERY, WEIGHTS):
        mean, weighted = found.geometric_mean, found.weighted
        assert (mean is None) is (weighted is None) is (not found.ranked)
        assert mean is None or (math.isfinite(mean) and mean > 0)
        saved = savings(found, WEIGHTS, References())
        before = sum(sum(WEIGHTS["scale", one.workload].values()) * one.reference.median_us for one in found.passed)
        assert not saved or saved[ALL_PHASES].saved_us <= before * (1 + 1e-9)


# Against the engine's own kernels


def call(number, count):
    return Call(id=number, operator=f"x::op{number}", counts=[Count(phase=p, count=n) for p, n in count.items()])


CALLS = [call(0, {"decode": 10, "prefill": 2}), call(1, {"decode": 30}), call(2, {"decode": 100})]


def measured(number, us, phases=(), **more):
    one = CALLS[number]
    told = {"call": number, "key": call_key(one), "operator": one.operator, "median_us": us, "method": "graph"}
    counts = {each.phase: each.count for each in one.counts}
    return Measurement(**{**told, "count": one.total, "counts": counts, "phases": list(phases), **more})


def counted(workload, number, samples=1):
    one = CALLS[number]
    return WorkloadCount(
        definition="scale", workload=workload, operator=one.operator, call=number, samples=samples, counts=one.counts
    )


def saved_on(base, *outcomes, counts):
    found = score_solutions(outcomes, EVERY, workload_weights(counts))[0]
    return savings(found, workload_weights(counts), base)


TWO = [counted("s1", 0), counted("s2", 1)]


def test_the_share_is_of_all_kernels_of_the_phase():
    base = measured_baseline([measured(0, 20), measured(1, 20), measured(2, 2)], TWO, CALLS)
    saved = saved_on(base, outcome("s1", us=10), outcome("s2", us=5), counts=TWO)
    assert saved["decode"].total_us == pytest.approx(40 * 20 + 100 * 2)
    assert saved["decode"].saved_us == pytest.approx(10 * 10 + 30 * 15)
    assert saved["prefill"].share == pytest.approx(0.5)
    assert saved[ALL_PHASES].share == pytest.approx((10 * 10 + 30 * 15 + 2 * 10) / (40 * 20 + 100 * 2 + 2 * 20))


def test_a_workload_that_did_not_pass_keeps_the_engines_time():
    base = measured_baseline([measured(0, 20), measured(1, 20)], TWO, CALLS)
    saved = saved_on(base, outcome("s1", us=10), outcome("s2", status="TIMEOUT"), counts=TWO)
    assert saved["decode"].saved_us == pytest.approx(100)
    assert saved["decode"].total_us == pytest.approx(800)


def test_the_baseline_is_the_engines_kernel_and_not_the_reference():
    base = measured_baseline([measured(0, 4), measured(1, 4)], TWO, CALLS)
    saved = saved_on(base, outcome("s1", us=5, reference=1000), outcome("s2", us=5, reference=1000), counts=TWO)
    assert saved["decode"].saved_us == pytest.approx(-40)


def test_samples_of_a_phase_are_its_time_and_share_its_counts():
    two = [counted("s1", 0, samples=2), counted("s2", 0, samples=2)]
    lines = [measured(0, 10, ["decode"]), measured(0, 30, ["decode"]), measured(0, 100, ["prefill"])]
    base = measured_baseline(lines, two, CALLS)
    assert base.totals == {"decode": pytest.approx(200), "prefill": pytest.approx(200)}
    assert sum(times["decode"] for times in base.times.values()) == pytest.approx(200)


def test_host_operators_are_no_part_of_gpu_time():
    base = measured_baseline([measured(0, 20), measured(1, 500, method="host")], TWO, CALLS)
    assert sum(base.totals.values()) == pytest.approx(12 * 20)


def test_on_a_cpu_the_hosts_clock_is_the_time():
    base = measured_baseline([measured(0, 20, method="host"), measured(1, 10, method="host")], TWO, CALLS)
    assert sum(base.totals.values()) == pytest.approx(12 * 20 + 30 * 10)


def test_a_workload_whose_calls_were_not_all_measured_saves_nothing_and_is_said():
    both = [counted("s1", 0), counted("s1", 1), counted("s2", 1)]
    base = measured_baseline([measured(0, 20)], both, CALLS)
    assert base.times == {}
    assert "2 Workloads stand for calls that were not measured" in base.notes[0]


def test_calls_without_a_time_are_said():
    base = measured_baseline([measured(0, 20), measured(1, None, status="failed", method=None)], TWO, CALLS)
    assert base.notes[0].startswith("1 measured calls have no time")


def test_of_one_phase_replayed_totals_and_savings_are_that_phases_alone():
    decode = [measured(0, 20, count=10, counts={"decode": 10}), measured(1, 20)]
    base = measured_baseline(decode, TWO, CALLS)
    assert base.totals == {"decode": pytest.approx(800)}
    assert not base.notes
    saved = saved_on(base, outcome("s1", us=10), outcome("s2", us=5), counts=TWO)
    assert set(saved) == {"decode", ALL_PHASES}
    assert saved[ALL_PHASES].saved_us == pytest.approx(10 * 10 + 30 * 15)


def test_measurements_that_do_not_tell_their_counts_by_phase_have_those_of_the_call():
    older = [measured(0, 20, counts={}), measured(1, 20, counts={})]
    assert measured_baseline(older, TWO, CALLS) == measured_baseline([measured(0, 20), measured(1, 20)], TWO, CALLS)
    one_phase = [measured(0, 20, count=10, counts={}), measured(1, 20)]
    assert measured_baseline(one_phase, TWO, CALLS).totals == {"all": 200, "decode": 600}


def test_measurements_of_other_calls_are_refused():
    with pytest.raises(CallError, match="no call of PATH"):
        measured_baseline([measured(0, 20, key="0123456789ab")], TWO, CALLS)


def test_calls_are_known_by_their_key_and_not_by_their_number():
    base = measured_baseline([measured(0, 20).model_copy(update={"call": 1})], TWO, CALLS)
    assert set(base.times) == {("scale", "s1")}


def test_measurements_of_a_dataset_are_its_whole():
    lines = [
        Measurement(definition="scale", workload=uuid, operator="scale", median_us=20, count=1)
        for uuid in EVERY["scale"]
    ]
    base = measured_baseline(lines, COUNTS, [])
    assert base.totals == {"decode": pytest.approx(40 * 20)}


def test_without_the_recording_only_the_total_of_all_phases_is_known():
    base = measured_baseline([measured(0, 20, counts={}), measured(1, 20, counts={})], TWO, [])
    saved = saved_on(base, outcome("s1", us=10), outcome("s2", us=10), counts=TWO)
    assert (saved["decode"].share, saved["prefill"].share) == (None, None)
    assert saved[ALL_PHASES].share == pytest.approx(0.5)


def test_times_of_another_device_are_not_compared():
    judged = [outcome("s1", us=1, device_name="H200")]
    assert "measured on A100, judged on H200" in str(why_not_comparable([measured(0, 1, device_name="A100")], judged))
    assert why_not_comparable([measured(0, 1, device_name="H200")], judged) is None


def test_times_of_other_threads_are_not_compared():
    judged = [outcome("s1", us=1, device_name="EPYC", threads=1)]
    lines = [measured(0, 1, device_name="EPYC", threads=2)]
    assert "EPYC with 2 threads (--threads), judged on EPYC with 1" in str(why_not_comparable(lines, judged))


def test_kernels_measured_far_slower_than_their_references_are_doubted():
    base = measured_baseline([measured(0, 41), measured(1, 39)], TWO, CALLS)
    both = [outcome("s1", us=1), outcome("s2", us=1)]
    assert count_doubtful(both, base, workload_weights(TWO)) == 1


def test_phases_of_a_baseline_are_summed_exactly_once():
    base = Measured("x", {("scale", "s1"): {"decode": 100.0, "prefill": 40.0}}, {"decode": 200.0, "prefill": 40.0})
    weights = {("scale", "s1"): Counter(decode=10, prefill=2)}
    found = score_solutions([outcome("s1", us=5)], {"scale": ["s1"]}, weights)[0]
    assert savings(found, weights, base)[ALL_PHASES].before_us == pytest.approx(140)


# What the command says


def test_without_measurements_the_share_of_the_whole_is_said_to_be_unknown(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast", us=5, reference_us=20)
    out = bench().out
    assert "scale/ann/fast saves 600.00 µs of the 800.00 µs that the references take in decode" in out
    assert "not known without --measurements FILE" in out
    assert "of the time" not in out


def test_with_measurements_the_share_of_decode_time_is_said(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast", us=5)
    lines = [
        Measurement(definition=name, workload=uuid, operator=name, median_us=20, count=1, device_name="Fake")
        for name, uuid in (("scale", "s1"), ("scale", "s2"), ("masked", "k1"))
    ]
    measurements_file.write_measurements(tmp_path / "m.jsonl", lines)
    out = bench("--measurements", tmp_path / "m.jsonl").out
    assert "scale/ann/fast saves 66.7% of decode time (600.00 µs of 900.00 µs, the references as measured)" in out


def test_a_dataset_without_counts_says_that_nothing_is_weighed(bench, tmp_path):
    write_judged(tmp_path / "dataset", counts=[])
    write_solution(tmp_path / "solutions", "fast")
    out = bench().out
    assert "no counts are known" in out
    assert "scale/ann/fast saves 20.00 µs of the 40.00 µs that the references take\n" in out
    assert "other time" not in out


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_names_of_solutions_and_all_numbers_are_whole_at_every_width(bench, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "a_kernel_with_a_long_name", us=5, reference_us=20)
    told = {uuid: {"status": "TIMEOUT", "reason": "took far too long"} for uuid in ("s1", "s2")}
    write_solution(tmp_path / "solutions", "slow", **told)
    lines = bench().out.splitlines()
    (row,) = [line for line in lines if line.startswith("  ann/a_kernel_with_a_long_name ")]
    assert row.split()[1:4] == ["2/2", "4.00×", "4.00×"] and "…" not in row
    assert max(map(len, lines)) <= width
    assert any("TIMEOUT 2: took far too long" in line for line in lines), "in the table or below it"


def test_names_that_look_like_markup_are_told_as_they_are(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "red]", author="[")
    assert "  [/red] " in bench().out


def test_measurements_that_cannot_be_read_are_refused_before_anything_is_judged(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast")
    (tmp_path / "m.jsonl").write_text("{")
    assert bench("--measurements", tmp_path / "m.jsonl").code == 1
    assert not (tmp_path / "out").exists()


def test_solutions_get_the_threads_of_the_measurements_and_keep_them_when_resumed(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast")
    line = Measurement(definition="scale", workload="s1", operator="scale", median_us=20, count=1, threads=2)
    measurements_file.write_measurements(tmp_path / "m.jsonl", [line])
    assert bench("--measurements", tmp_path / "m.jsonl").code == 0
    assert read_run(tmp_path / "out").threads == 2
    resumed = bench("--resume")
    assert (resumed.code, read_run(tmp_path / "out").threads) == (0, 2), resumed.err


def test_the_command_that_measures_uses_the_solutions_threads(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast")
    next_step = bench().err.splitlines()[-1].removeprefix("Next: ")
    assert shlex.split(next_step)[:3] == ["kcap", "replay", str(tmp_path / "dataset")]
    assert "(" not in next_step, "a shell takes it as it is"


def test_what_limits_a_time_is_said(bench, tmp_path, monkeypatch):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast", us=5, reference_us=20)
    load = iter([0.0, 1.3])
    monkeypatch.setattr("kcap.commands.bench.processors_in_use", lambda: next(load))
    out = bench("--json").out
    told = orjson.loads(out)
    assert told["processors_in_use"] == [0.0, 1.3] and told["solutions"][0]["spread"] is not None
    assert any(
        note.startswith("others had 0.0 processors of this machine before the run and 1.3") for note in told["notes"]
    )


def test_the_table_names_the_gravest_reason(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    wrong = {"output": "y", "expected": 1.0, "found": 0.0, "wrong": 2, "total": 8, "where": "row 1"}
    hack = {"status": "REWARD_HACK", "reason": "work done later", "wrong": [wrong]}
    told = {"s1": {"status": "TIMEOUT", "reason": "slow"}, "s2": hack}
    write_solution(tmp_path / "solutions", "sly", **told)
    out = bench().out
    assert "work done later" in out and "0/2" in out


def test_json_says_what_the_best_save_together(bench, tmp_path):
    write_judged(tmp_path / "dataset")
    write_solution(tmp_path / "solutions", "fast", us=5, reference_us=20)
    write_solution(tmp_path / "solutions", "faster", us=4, reference_us=20)
    write_solution(tmp_path / "solutions", "mask", "masked", us=10, reference_us=20)
    told = orjson.loads(bench("--json").out)
    assert told["best"] == ["masked/ann/mask", "scale/ann/faster"]
    assert told["saves"]["all"]["saved_us"] == pytest.approx(40 * 16 + 5 * 10)

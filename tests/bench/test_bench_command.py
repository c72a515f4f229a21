"""`kcap bench` around the judge: what it refuses, what it writes, and what its exit code says."""

from __future__ import annotations

import fcntl
import os

import orjson
import pytest
from bench_datasets import SCALE
from judged import WORKLOADS, outcomes_in, statuses, write_judged, write_solution

from kcap.bench.run.executors import local
from kcap.schemas.flashinfer import benchmark_result
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer import trace as traces_file
from kcap.schemas.validation.formats import detect_format


@pytest.fixture
def solutions(tmp_path):
    write_judged(tmp_path / "dataset")
    return tmp_path / "solutions"


def test_every_solution_is_judged_on_every_workload_of_its_definition(bench, solutions, tmp_path):
    write_solution(solutions, "fast", us=5, reference_us=20)
    write_solution(solutions, "wrong", status="INCORRECT_NUMERICAL")
    write_solution(solutions, "mask", "masked")
    done = bench()
    assert done.code == 0, done.err
    assert statuses(tmp_path / "out") == {
        ("fast", "s1"): "PASSED",
        ("fast", "s2"): "PASSED",
        ("wrong", "s1"): "INCORRECT_NUMERICAL",
        ("wrong", "s2"): "INCORRECT_NUMERICAL",
        ("mask", "k1"): "PASSED",
    }


def test_an_outcome_has_the_names_that_were_asked_for_whatever_the_judge_says(bench, solutions, tmp_path):
    file = write_solution(solutions, "fast")
    bench()
    first = outcomes_in(tmp_path / "out")[0]
    assert (first.solution, first.definition, first.author, first.file) == ("fast", "scale", "ann", str(file))


def test_the_worst_element_of_a_wrong_output_is_in_the_table(bench, solutions, tmp_path):
    wrong = {"output": "y", "index": [1], "expected": 2.0, "found": 3.0, "wrong": 1, "total": 8, "where": "row 1"}
    write_solution(solutions, "wrong", status="INCORRECT_NUMERICAL", reason="y is off", wrong=[wrong])
    assert "y[1] is 3, expected 2; 1 of 8 are wrong: row 1" in bench().out
    assert outcomes_in(tmp_path / "out")[0].wrong[0].where == "row 1"


def test_outcomes_have_the_recorded_counts(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    assert {one.workload: one.count for one in outcomes_in(tmp_path / "out")} == {"s1": 10, "s2": 30}


def test_the_most_counted_workloads_come_first_where_only_some_are_wanted(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    done = bench("--workloads", 1)
    assert statuses(tmp_path / "out") == {("fast", "s2"): "PASSED"}
    assert "75.0% of these Definitions' counts" in done.out


def test_definitions_are_chosen_by_globs_and_others_are_no_fault(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    write_solution(solutions, "mask", "masked")
    assert bench("--op", "ma*").code == 0
    assert statuses(tmp_path / "out") == {("mask", "k1"): "PASSED"}


def test_a_bad_file_costs_itself_and_makes_the_run_partial(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    (solutions / "broken.json").write_text("{")
    done = bench()
    assert done.code == 3
    assert "refused" in done.out and "broken.json" in done.out
    assert len(outcomes_in(tmp_path / "out")) == 2
    assert "broken.json" in orjson.loads((tmp_path / "out" / "bench.json").read_bytes())["refused"][0]["file"]


def test_where_nothing_could_be_judged_the_run_failed(bench, solutions):
    write_solution(solutions, "lost", status="NOT_JUDGED", reason="its blob is missing")
    done = bench()
    assert (done.code, "its blob is missing: 2 Workloads" in done.out) == (1, True)


@pytest.mark.parametrize("others, code", [(["fast"], 3), ([], 1)])
def test_a_solution_of_a_definition_without_workloads_was_not_judged(bench, solutions, tmp_path, others, code):
    write_judged(tmp_path / "few", counts=[], workloads={"scale": WORKLOADS["scale"]})
    write_solution(solutions, "alone", "masked")
    for name in others:
        write_solution(solutions, name)
    done = bench(path=tmp_path / "few")
    assert (done.code, "masked: has no Workloads" in done.out) == (code, True)


def test_what_could_not_be_judged_makes_the_run_partial(bench, solutions):
    write_solution(solutions, "half", s1={"status": "NOT_JUDGED"})
    assert bench().code == 3


@pytest.mark.parametrize("status", ["PASSED", "COMPILE_ERROR"])
@pytest.mark.parametrize("of", [None, "s2", 5])
def test_an_outcome_is_of_the_workload_that_was_asked_for(bench, solutions, tmp_path, status, of):
    write_solution(solutions, "sly", status=status, of=of)
    assert bench().code == 0
    assert statuses(tmp_path / "out") == {("sly", "s1"): status, ("sly", "s2"): status}
    (traces,) = (tmp_path / "out" / "traces").rglob("*.jsonl")
    assert [trace.workload.uuid for trace in traces_file.read(traces)] == ["s1", "s2"]


def test_traces_are_flashinfer_benchs_with_the_reason_for_what_its_statuses_lack(bench, solutions, tmp_path):
    write_solution(solutions, "fast", us=5, reference_us=20)
    write_solution(solutions, "sly", status="REWARD_HACK", reason="the work was done later")
    write_solution(solutions, "lost", author="bob", status="NOT_JUDGED")
    bench()
    (path,) = (tmp_path / "out" / "traces").rglob("*.jsonl")
    assert path.relative_to(tmp_path / "out").as_posix() == f"traces/ann/{SCALE.op_type}/scale.jsonl"
    fast, _, sly, _ = traces_file.read(path)
    assert fast.evaluation.performance.latency_ms == 0.005
    assert fast.evaluation.performance.reference_latency_ms == 0.02
    assert fast.evaluation.performance.speedup_factor == 4
    assert fast.evaluation.correctness.max_absolute_error == 1e-6
    assert sly.evaluation.status == "RUNTIME_ERROR"
    assert sly.evaluation.log == "REWARD_HACK: the work was done later"


def test_flashinfer_bench_reads_the_traces(bench, solutions, tmp_path):
    Trace = pytest.importorskip("flashinfer_bench.data").Trace
    for name, status in enumerate(("PASSED", "INCORRECT_NUMERICAL", "REWARD_HACK", "TIMEOUT", "COMPILE_ERROR")):
        write_solution(solutions, f"s{name}", status=status)
    bench()
    (path,) = (tmp_path / "out" / "traces").rglob("*.jsonl")
    assert len([Trace.model_validate_json(line) for line in path.read_bytes().splitlines()]) == 10


def test_every_solution_that_a_trace_names_lies_beside_it_whatever_form_it_was_read_in(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    (solutions / "fast.json").unlink()
    (solutions / "plain.py").write_text("# {}\n# definition: scale\ndef run(x, eps):\n    return x * eps\n")
    assert bench("--resume").code == 0
    for path in (tmp_path / "out" / "traces").rglob("*.jsonl"):
        folder = tmp_path / "out" / "solutions" / path.relative_to(tmp_path / "out" / "traces").with_suffix("")
        written = {solutions_file.read(file).name for file in folder.glob("*.json")}
        assert {trace.solution for trace in traces_file.read(path)} == written
    assert sorted(file.stem for file in (tmp_path / "out" / "solutions").rglob("*.json")) == ["fast", "plain"]


def test_results_have_the_older_form(bench, solutions, tmp_path):
    write_solution(solutions, "fast", us=5, reference_us=20)
    write_solution(solutions, "broken", status="COMPILE_ERROR", reason="no")
    write_solution(solutions, "wrong", status="INCORRECT_NUMERICAL")
    bench()
    folder = tmp_path / "out" / "results"
    found = {str(path.relative_to(folder)): benchmark_result.read(path) for path in folder.rglob("*.json")}
    assert set(found) == {f"scale/ann/{name}/{uuid}.json" for name in ("fast", "broken") for uuid in ("s1", "s2")}
    assert (found["scale/ann/fast/s1.json"].time, found["scale/ann/fast/s1.json"].speedup) == (0.005, 4)


def test_bench_json_says_what_was_judged(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench("--seconds", 0.25)
    told = orjson.loads((tmp_path / "out" / "bench.json").read_bytes())
    assert told["device"] == "cpu"
    assert told["machine"] == {"devices": ["Fake"], "torch": "2.0", "driver": None}
    assert told["options"]["seconds"] == 0.25
    assert set(told["solutions"]) == {"scale/ann/fast"}


def test_json_is_for_programs(bench, solutions):
    write_solution(solutions, "fast", us=5, reference_us=20)
    told = orjson.loads(bench("--json").out)
    (score,) = told["solutions"]
    assert (score["passed"], score["geometric_mean"], score["weighted"]) == (2, pytest.approx(4), pytest.approx(4))


def test_a_dataset_is_code_from_elsewhere(kcap, solutions, tmp_path):
    write_solution(solutions, "fast")
    done = kcap("bench", tmp_path / "dataset", "--solutions", solutions, "-o", tmp_path / "out")
    assert (done.code, "--trust" in done.err, (tmp_path / "out").exists()) == (2, True, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "cuda"), "finds no CUDA GPU"),
        (("--device", "cuda:0"), "finds no CUDA GPU"),
        (("--device", "tpu"), "not a device"),
        (("--device", "0"), "not a device"),
        (("--op", "nothing*"), "--op"),
        (("--definition", "scael"), "scale"),
        (("--measurements", "nothing"), "no such file"),
        (("--resume", "--force"), "one of them"),
        (("--solutions", "nowhere"), "nowhere"),
    ],
)
def test_a_wrong_call_is_one_line_that_names_the_fix_and_writes_nothing(
    bench, solutions, tmp_path, monkeypatch, options, words
):
    monkeypatch.setattr(local, "gpus", tuple)
    write_solution(solutions, "fast")
    done = bench(*options)
    assert (done.code, words in done.err, len(done.err.splitlines())) == (2, True, 1), done.err
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_is_named_with_how_many_are(bench, solutions, monkeypatch):
    monkeypatch.setattr(local, "gpus", lambda: ("H200", "H200"))
    write_solution(solutions, "fast")
    done = bench("--device", "cuda:2")
    assert (done.code, "this machine has 2 GPUs" in done.err) == (2, True)


def test_an_output_that_exists_is_resumed_or_replaced_only_when_asked(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    assert bench().code == 0
    again = bench()
    assert (again.code, "--resume" in again.err, "--force" in again.err) == (2, True, True)
    (tmp_path / "out" / "stale").write_text("")
    assert bench("--force").code == 0
    assert not (tmp_path / "out" / "stale").exists()
    assert len(outcomes_in(tmp_path / "out")) == 2


def test_force_never_removes_what_bench_did_not_make(kcap, solutions, tmp_path):
    write_solution(solutions, "fast")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for output in (mine, mine / "thesis.txt", tmp_path, solutions, tmp_path / "dataset"):
        args = ("--solutions", solutions, "-o", output, "--trust", "--device", "cpu", "--force")
        done = kcap("bench", tmp_path / "dataset", *args)
        assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert (mine / "thesis.txt").read_text() == "years"


def test_force_never_removes_the_solutions_or_the_dataset(kcap, bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    for name in ("solutions", "dataset"):
        inside = (tmp_path / name).rename(tmp_path / "out" / f"own_{name}")
        args = {"solutions": solutions, "dataset": tmp_path / "dataset", name: inside}
        more = ("--solutions", args["solutions"], "-o", tmp_path / "out", "--trust", "--device", "cpu", "--force")
        done = kcap("bench", args["dataset"], *more)
        assert (done.code, "choose another -o" in done.err) == (2, True)
        inside.rename(tmp_path / name)


def test_two_runs_never_write_one_output(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    done = bench()
    os.close(other)
    assert (done.code, "another kcap bench" in done.err) == (2, True)


def test_a_dataset_whose_own_solutions_are_broken_is_judged_on_all_the_same(bench, solutions, tmp_path):
    (tmp_path / "dataset" / "solutions").mkdir()
    (tmp_path / "dataset" / "solutions" / "broken.json").write_text("{")
    write_solution(solutions, "fast")
    assert bench().code == 0


def test_all_that_is_written_is_valid_and_told_apart(bench, kcap, solutions, tmp_path):
    write_solution(solutions, "fast")
    write_solution(solutions, "broken", status="COMPILE_ERROR")
    write_solution(solutions, "wrong", status="INCORRECT_NUMERICAL")
    bench()
    out = tmp_path / "out"
    (traces,), results = (out / "traces").rglob("*.jsonl"), sorted((out / "results").rglob("*.json"))
    done = kcap("validate", out / "outcomes.jsonl", traces, *results)
    assert done.code == 0, done.out
    whole = kcap("validate", out)
    assert (whole.code, whole.out) == (0, f"{out}: valid, a run of kcap bench\n")
    assert (detect_format(out), detect_format(out / "bench.json")) == ("bench-run", "bench-record")
    assert (detect_format(out / "outcomes.jsonl"), detect_format(traces)) == ("outcome", "trace")
    assert {detect_format(one) for one in results} == {"benchmark-result"}


def test_a_runs_folder_that_was_changed_is_not_valid(bench, kcap, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    outcomes = tmp_path / "out" / "outcomes.jsonl"
    outcomes.write_bytes(outcomes.read_bytes().replace(b'"solution":"fast"', b'"solution":"faster"', 1) + b"{}\n")
    (trace,) = (tmp_path / "out" / "traces").rglob("*.jsonl")
    trace.write_text("[]\n")
    done = kcap("validate", tmp_path / "out")
    assert done.code == 1
    assert "bench.json names no scale/ann/faster" in done.out
    assert f"{outcomes}:" in done.out and str(trace) in done.out


def test_the_machine_stands_above_the_table(bench, solutions):
    write_solution(solutions, "fast")
    assert bench().out.splitlines()[0] == "Fake · torch 2.0"


def test_nothing_but_results_goes_to_standard_output(bench, solutions):
    write_solution(solutions, "fast")
    out = bench("--json").out
    assert out.startswith("{") and orjson.loads(out)

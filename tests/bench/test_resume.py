"""`kcap bench --resume`: whatever stopped a run, what was judged is kept and the rest is judged, on the same things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from bench_datasets import SCALE, stored, workload
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judged import EPS, WORKLOADS, outcomes_in, statuses, write_judged, write_solution

from kcap.bench.run import output as outcomes_file
from kcap.bench.run.output import check_machine, check_same_run
from kcap.errors import CallError, FormatError
from kcap.schemas.results.bench_run import Machine, RunRecord
from kcap.schemas.results.outcome import STATUSES, Outcome

HERE = Path(__file__).parent
BENCH = """
import sys
from functools import partial
from kcap.bench.run.executors import SlotRequest
from kcap.bench.run import bench_run
from kcap.cli import main
bench_run.SlotRequest = partial(SlotRequest, module="fake_judge")
main(sys.argv[1:])
"""


@pytest.fixture
def solutions(tmp_path):
    write_judged(tmp_path / "dataset")
    return tmp_path / "solutions"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the judge was asked since the last call: Solution and Workload."""
    path = tmp_path / "journal"
    monkeypatch.setenv("FAKE_JOURNAL", str(path))

    def take():
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return [(solution, workload) for _, _, solution, workload in lines]

    return take


def outcome(workload="s1", status="PASSED", **more):
    return Outcome(solution="fast", author="ann", definition="scale", workload=workload, status=status, **more)


def test_what_was_judged_is_not_judged_again(bench, solutions, tmp_path, asked):
    write_solution(solutions, "fast")
    bench()
    asked()
    first = (tmp_path / "out" / "outcomes.jsonl").read_bytes()
    assert bench("--resume").code == 0
    assert asked() == []
    assert (tmp_path / "out" / "outcomes.jsonl").read_bytes() == first


def test_a_new_solution_is_judged_beside_the_others(bench, solutions, asked, tmp_path):
    write_solution(solutions, "fast")
    bench()
    asked()
    write_solution(solutions, "new")
    bench("--resume")
    assert asked() == [("new", "s2"), ("new", "s1")]
    assert len(statuses(tmp_path / "out")) == 4


def test_a_solution_that_changed_is_judged_again(bench, solutions, asked, tmp_path):
    write_solution(solutions, "fast")
    write_solution(solutions, "other")
    bench()
    asked()
    write_solution(solutions, "fast", status="INCORRECT_SHAPE")
    bench("--resume")
    assert asked() == [("fast", "s2"), ("fast", "s1")]
    assert statuses(tmp_path / "out")[("fast", "s1")] == "INCORRECT_SHAPE"
    assert len(outcomes_in(tmp_path / "out")) == 4
    bench("--resume")
    assert asked() == []


def test_what_was_not_judged_is_judged_again(bench, solutions, asked, tmp_path):
    write_solution(solutions, "fatal", s1={"die": 2})
    assert bench().code == 3
    asked()
    write_solution(solutions, "new")
    bench("--resume", "--op", "scale")
    assert ("fatal", "s1") in asked()
    assert len(outcomes_in(tmp_path / "out")) == 4


@pytest.mark.parametrize("option", ["--timeout", "--build-timeout"])
def test_what_took_too_long_is_judged_again_where_it_gets_longer(bench, solutions, asked, option):
    write_solution(solutions, "slow", s1={"status": "TIMEOUT"})
    bench(option, 20)
    asked()
    for seconds, again in ((20, []), (10, []), (40, [("slow", "s1")]), (40, [])):
        assert bench("--resume", option, seconds).code == 0
        assert asked() == again, seconds


def test_times_of_other_sampling_are_kept_apart(bench, solutions, tmp_path, asked):
    write_solution(solutions, "fast")
    bench("--seconds", 0.25)
    asked()
    before = (tmp_path / "out" / "bench.json").read_bytes()
    done = bench("--resume")
    assert (done.code, "--seconds 0.25, and this is 0.1: pass --seconds 0.25" in done.err) == (2, True), done.err
    assert (asked(), (tmp_path / "out" / "bench.json").read_bytes()) == ([], before)
    assert bench("--resume", "--seconds", 0.25).code == 0


def test_a_solution_that_is_gone_keeps_its_outcomes_and_its_traces(bench, solutions, tmp_path):
    gone = write_solution(solutions, "gone")
    write_solution(solutions, "fast")
    bench()
    gone.unlink()
    done = bench("--resume", "--json")
    assert [one["solution"] for one in orjson.loads(done.out)["solutions"]] == ["fast"]
    assert ("gone", "s1") in statuses(tmp_path / "out")
    (traces,) = (tmp_path / "out" / "traces").rglob("*.jsonl")
    assert b'"gone"' in traces.read_bytes()


def test_a_line_that_broke_off_is_dropped_and_said(bench, solutions, asked, tmp_path):
    write_solution(solutions, "fast")
    bench()
    asked()
    path = tmp_path / "out" / "outcomes.jsonl"
    path.write_bytes(path.read_bytes()[:-1])  # even the last line's break alone
    done = bench("--resume")
    assert "broken off" in done.err
    assert asked() == [("fast", "s1")]
    assert len(outcomes_in(tmp_path / "out")) == 2


def test_a_damaged_line_in_the_middle_is_named(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    path = tmp_path / "out" / "outcomes.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    done = bench("--resume")
    assert (done.code, f"{path}:1" in done.err) == (1, True)


def test_an_output_of_another_dataset_names_both(bench, solutions, tmp_path):
    write_solution(solutions, "fast")
    bench()
    write_judged(tmp_path / "other", counts=[], workloads={"scale": WORKLOADS["scale"][:1]})
    done = bench("--resume", path=tmp_path / "other")
    assert done.code == 2
    assert str(tmp_path / "dataset") in done.err and str(tmp_path / "other") in done.err


def test_the_same_dataset_at_another_place_is_resumed(bench, solutions, tmp_path, asked):
    write_solution(solutions, "fast")
    bench()
    asked()
    write_judged(tmp_path / "moved")
    assert bench("--resume", path=tmp_path / "moved").code == 0
    assert asked() == []


def blob(folder, content):
    path = folder / stored(SCALE, "s1", "x").path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))


def test_other_blobs_of_the_same_workloads_are_another_dataset(bench, solutions, tmp_path, asked):
    given = {**WORKLOADS, "scale": [workload(SCALE, "s1", x=stored(SCALE, "s1", "x"), eps=EPS)]}
    folders = [write_judged(tmp_path / name, counts=[], workloads=given) for name in ("one", "copy", "other", "none")]
    for folder, content in zip(folders, (b"numbers", b"numbers", b"letters"), strict=False):
        blob(folder, content)
    write_solution(solutions, "fast")
    bench(path=folders[0])
    asked()
    write_solution(solutions, "new")
    codes = []
    for folder in folders[1:]:
        done = bench("--resume", path=folder)
        codes.append((done.code, "other blobs of scale" in done.err))
    assert codes == [(0, False), (2, True), (2, True)]
    assert asked() == [("new", "s1")]


def test_another_definitions_blobs_are_not_read(bench, solutions, tmp_path):
    given = {**WORKLOADS, "scale": [workload(SCALE, "s1", x=stored(SCALE, "s1", "x"), eps=EPS)]}
    folder = write_judged(tmp_path / "stored", counts=[], workloads=given)
    write_solution(solutions, "alone", "masked")
    bench(path=folder)
    blob(folder, b"new")
    write_solution(solutions, "fast")
    assert bench("--resume", path=folder).code == 0
    blob(folder, b"old")
    assert bench("--resume", path=folder).code == 2


def test_an_output_of_another_machine_names_both(bench, solutions, monkeypatch):
    write_solution(solutions, "fast")
    bench()
    write_solution(solutions, "new")
    monkeypatch.setenv("FAKE_DEVICE", "Slower")
    done = bench("--resume")
    assert (done.code, "Fake" in done.err, "Slower" in done.err) == (2, True, True)


RUN = RunRecord(kcap="1", path="a", identity="0", device="cpu")


@pytest.mark.parametrize(
    ("field", "before", "now"), [("device", "cuda", "cpu"), ("kcap", "0.9", "1"), ("threads", 1, 2)]
)
def test_outcomes_that_cannot_stand_beside_each_other_are_kept_apart(field, before, now):
    with pytest.raises(CallError, match=f"{before}.*{now}"):
        check_same_run(Path("out"), RUN.model_copy(update={field: before}), RUN.model_copy(update={field: now}))


def test_another_torch_is_another_machine():
    with pytest.raises(CallError, match=r"torch 2\.11.*2\.13"):
        check_machine(Path("out"), Machine(devices=["A"], torch="2.11"), Machine(devices=["A"], torch="2.13"))


def test_a_run_that_no_judge_joined_is_of_no_machine():
    check_machine(Path("out"), Machine(), Machine(devices=["A"], torch="2.13"))


outcomes = st.builds(
    outcome,
    workload=st.sampled_from(["s1", "s2", "s3"]),
    status=st.sampled_from(STATUSES),
    reason=st.none() | st.text(max_size=8),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(outcomes, max_size=6), st.data())
def test_a_file_that_is_cut_anywhere_keeps_each_whole_line_and_the_last_of_each_workload(tmp_path, given_ones, data):
    content = b"".join(one.line() for one in given_ones)
    cut = data.draw(st.integers(0, len(content)))
    (tmp_path / outcomes_file.OUTCOMES_FILE).write_bytes(content[:cut])
    kept = outcomes_file.keep_outcomes(tmp_path, lambda one: one.status != "NOT_JUDGED")
    whole = given_ones[: content[:cut].count(b"\n")]
    latest = {one.workload: one for one in whole if one.status != "NOT_JUDGED"}
    assert {one.workload: one for one in kept.outcomes} == latest
    assert kept.torn is (cut > 0 and content[cut - 1 : cut] != b"\n")
    assert (
        list(outcomes_file.outcomes_file.read_outcomes(tmp_path / outcomes_file.OUTCOMES_FILE)) == kept.outcomes
        if content[:cut]
        else True
    )


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_lies_in_the_file_is_kept_dropped_or_named(tmp_path, content):
    (tmp_path / outcomes_file.OUTCOMES_FILE).write_bytes(content)
    try:
        outcomes_file.keep_outcomes(tmp_path, lambda one: True)
    except FormatError as error:
        assert outcomes_file.OUTCOMES_FILE in str(error)


def started(tmp_path: Path) -> subprocess.Popen[bytes]:
    args = ("--solutions", tmp_path / "solutions", "-o", tmp_path / "out", "--trust", "--device", "cpu")
    command = [sys.executable, "-c", BENCH, "bench", str(tmp_path / "dataset"), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip


def wait_for(lines: int, tmp_path: Path) -> None:
    path, deadline = tmp_path / "out" / "outcomes.jsonl", time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline, "it judged nothing"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_leaves_no_judge_and_is_finished_by_resume(bench, solutions, tmp_path, asked, how):
    for i in range(3):
        write_solution(solutions, f"s{i}", sleep=2 if i else 0.2)
    run = started(tmp_path)
    wait_for(2, tmp_path)
    os.kill(run.pid, how)
    _, err = run.communicate(timeout=30)
    wait_for_end(int((tmp_path / "journal").read_text().split()[0]))
    kept = len(outcomes_in(tmp_path / "out"))
    assert 2 <= kept < 6
    if how == signal.SIGINT:
        assert run.returncode == 1 and b"--resume" in err and b"Traceback" not in err
    asked()
    assert bench("--resume").code == 0
    assert len(asked()) == 6 - kept
    assert len(statuses(tmp_path / "out")) == len(outcomes_in(tmp_path / "out")) == 6


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline, "the judge is still there"
        time.sleep(0.05)

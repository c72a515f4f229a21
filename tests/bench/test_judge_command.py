"""`kcap judge` around the judge: what is said of a Solution, in which order, and what the exit code means."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import orjson
import pytest
from bench_datasets import SCALE, counted, workload

from kcap.bench.run.executors import SlotRequest
from kcap.bench.run.options import JudgeOptions
from kcap.bench.tasks import warm_judge
from kcap.bench.tasks.folder import open_task
from kcap.bench.tasks.serve import serve
from kcap.bench.tasks.warm_judge import WarmJudge
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import ScalarInput
from kcap.schemas.results.measurement import Measurement, write_measurements
from kcap.schemas.results.outcome import WrongElements
from kcap.schemas.results.verdict import VERDICT_ADAPTER

EPS = ScalarInput(value=0.5)
COUNTS = {"s1": 10, "s2": 30, "s3": 2}
WRONG = WrongElements(
    output="y", index=[1, 3], expected=1.5, found=0.0, tolerance=1e-4, wrong=2, total=8, where="row 1"
)


@pytest.fixture
def task(kcap, tmp_path, monkeypatch):
    """A task of `scale` on three Workloads, whose Solutions tell the judge in fake_judge what to say."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(warm_judge, "SlotRequest", partial(SlotRequest, module="fake_judge"))
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    sizes = zip(COUNTS, (2, 3, 5), strict=True)
    workloads = {"scale": [workload(SCALE, uuid, m=size, eps=EPS) for uuid, size in sizes]}
    counts = [counted(SCALE, uuid, count, call) for call, (uuid, count) in enumerate(COUNTS.items())]
    write_dataset(tmp_path / "dataset", [SCALE], workloads, {}, counts)

    def make(*options):
        args = ("--definition", "scale", "-o", tmp_path / "task", "--trust", "--no-check")
        assert kcap("task", tmp_path / "dataset", *args, *options).code == 0
        return tmp_path / "task"

    return make


@pytest.fixture
def judge(kcap, task, tmp_path):
    """Writes the task's Solution, which tells what comes of it, and runs `kcap judge` on the task."""

    def run(*options, made=(), **told):
        if not (tmp_path / "task").exists():
            task(*made)
        write_solution(tmp_path / "task" / "solution" / "solution.py", **told)
        return kcap("judge", tmp_path / "task", "--trust", "--device", "cpu", *options)

    return run


def write_solution(path, **told):
    path.write_text("# " + json.dumps(told) + "\n# definition: scale\ndef run(x, eps):\n    return x * eps\n")
    return path


def measured(path, us):
    lines = [
        Measurement(
            definition="scale",
            workload=uuid,
            operator="scale",
            count=n,
            median_us=us,
            method="host",
            device_name="Fake",
        )
        for uuid, n in COUNTS.items()
    ]
    write_measurements(path, lines)
    return path


def verdict_of(done):
    return VERDICT_ADAPTER.validate_json(done.out)


def journal(tmp_path):
    """The Workloads that the judge was asked for, in their order."""
    return [line.split()[-1] for line in (tmp_path / "journal").read_text().splitlines()]


def test_what_passes_is_told_with_its_gain_weighted_by_the_engines_counts(judge):
    done = judge("--json", us=5, reference_us=20, s1={"us": 40})
    assert done.code == 0, done.err
    verdict = verdict_of(done)
    assert (verdict.status, verdict.complete, verdict.baseline) == ("PASSED", True, "the references")
    assert [(one.workload, one.count) for one in verdict.workloads] == [("s2", 30), ("s1", 10), ("s3", 2)]
    gain = verdict.gain["all"]
    assert (gain.before_us, gain.after_us) == (42 * 20, 10 * 40 + 32 * 5)
    assert gain.speedup == pytest.approx(840 / 560)
    assert [one.speedup for one in verdict.workloads] == [4, 0.5, 4]


def test_the_engines_own_times_are_the_baseline_where_they_are_known(judge, tmp_path):
    path = measured(tmp_path / "times.jsonl", us=8)
    verdict = verdict_of(judge("--json", made=("--measurements", path), us=4, reference_us=100))
    assert verdict.baseline == "the references as measured"
    assert [(one.engine_us, one.speedup) for one in verdict.workloads] == [(8, 2)] * 3
    assert (verdict.gain["all"].share, verdict.gain["all"].total_us) == (0.5, 42 * 8)


def test_times_of_another_machine_are_no_baseline(judge, tmp_path, monkeypatch):
    path = measured(tmp_path / "times.jsonl", us=8)
    lines = path.read_bytes().replace(b'"Fake"', b'"Other"')
    path.write_bytes(lines)
    verdict = verdict_of(judge("--json", made=("--measurements", path), us=4, reference_us=100))
    assert verdict.baseline == "the references"
    assert "measured on Other, judged on Fake" in verdict.notes[0]


def test_the_wrong_elements_are_said_with_the_place_the_numbers_and_how_many(judge):
    told = {"status": "INCORRECT_NUMERICAL", "reason": "y is off", "wrong": [WRONG.model_dump()]}
    done = judge(**told)
    assert done.code == 1
    assert "y[1, 3] is 0, expected 1.5 ± 0.0001; 2 of 8 are wrong: row 1" in done.out
    verdict = verdict_of(judge("--json", **told))
    assert verdict.workloads[0].wrong == [WRONG]
    assert verdict.next == [
        "compare with reference.py at the elements that are wrong",
        "at m 3: y[1, 3] is 0, expected 1.5 ± 0.0001; 2 of 8 are wrong: row 1",
    ]


def test_the_compilers_text_comes_with_file_and_line_and_the_rest_is_not_tried(judge, tmp_path):
    log = "/tmp/x/main.cpp:9:3: error: 'y' was not declared in this scope\n"
    done = judge("--json", status="COMPILE_ERROR", reason="does not compile", log=log)
    verdict = verdict_of(done)
    assert (done.code, verdict.status, len(verdict.workloads)) == (1, "COMPILE_ERROR", 1)
    assert (verdict.compiler[0].file, verdict.compiler[0].line) == ("main.cpp", 9)
    assert verdict.next == ["mend what the compiler says", "main.cpp:9: 'y' was not declared in this scope"]
    assert journal(tmp_path) == ["s2"]


def test_quick_is_the_most_counted_workload_alone(judge, tmp_path):
    verdict = verdict_of(judge("--quick", "--json", us=5, made=("--held-out", 1, "--held-out-to", tmp_path / "kept")))
    assert (journal(tmp_path), verdict.quick, verdict.complete) == (["s2"], True, False)
    assert "without --quick" in verdict.next[0]


def test_held_out_workloads_are_judged_last_and_told_as_sums_alone(judge, tmp_path):
    made = ("--held-out", 1, "--held-out-to", tmp_path / "kept")
    kept = "s3"
    done = judge("--json", made=made, us=5, **{kept: {"status": "INCORRECT_NUMERICAL", "reason": "y is off at 5"}})
    verdict = verdict_of(done)
    assert journal(tmp_path) == ["s2", "s1", kept]
    assert (done.code, verdict.status) == (1, "INCORRECT_NUMERICAL")
    assert (verdict.held_out.judged, verdict.held_out.passed) == (1, 0)
    assert "1 of the 1 held-out Workloads" in verdict.reason
    assert kept not in done.out and "y is off at 5" not in done.out


def test_held_out_workloads_are_not_spent_on_what_is_wrong_already(judge, tmp_path):
    made = ("--held-out", 1, "--held-out-to", tmp_path / "kept")
    verdict = verdict_of(judge("--json", made=made, s1={"status": "TIMEOUT"}))
    assert journal(tmp_path) == ["s2", "s1"]
    assert (verdict.status, verdict.held_out.judged, verdict.complete) == ("TIMEOUT", 0, False)


@pytest.mark.parametrize(
    ("told", "codes"),
    [
        ({"us": 5, "reference_us": 20}, {"never": 0, "wrong": 0, "slower": 0}),
        ({"us": 30, "reference_us": 20}, {"never": 0, "wrong": 0, "slower": 1}),
        ({"s3": {"status": "REWARD_HACK"}}, {"never": 0, "wrong": 1, "slower": 1}),
        ({"s3": {"status": "NOT_JUDGED"}}, {"never": 3, "wrong": 3, "slower": 3}),
        ({"status": "NOT_JUDGED"}, {"never": 1, "wrong": 1, "slower": 1}),
    ],
    ids=["faster", "slower", "hack", "part", "nothing"],
)
def test_the_exit_code_says_what_it_was_asked_to(judge, told, codes):
    assert {fail_on: judge("--fail-on", fail_on, **told).code for fail_on in codes} == codes


@pytest.mark.parametrize(
    ("told", "reward"), [({"us": 5, "reference_us": 20}, 4.0), ({"us": 5, "s3": {"status": "TIMEOUT"}}, 0.0)]
)
def test_the_reward_is_the_speedup_and_nothing_unless_all_passed(judge, tmp_path, told, reward):
    judge("--reward", tmp_path / "reward.json", **told)
    assert orjson.loads((tmp_path / "reward.json").read_bytes()) == {"reward": reward}


def test_a_solution_anywhere_is_judged_by_the_task_that_is_named(kcap, task, tmp_path):
    task()
    mine = write_solution(tmp_path / "mine.py", us=5)
    done = kcap("judge", mine, "--task", tmp_path / "task", "--trust", "--device", "cpu", "--json")
    assert (done.code, verdict_of(done).solution) == (0, "mine")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("dataset", "--task DIR"),
        ("task/solution/none.py", "no such Solution"),
        ("task/solution", "one Solution is judged at a time"),
    ],
)
def test_a_wrong_call_is_one_line(kcap, task, tmp_path, place, words):
    task()
    write_solution(tmp_path / "task" / "solution" / "second.py")
    done = kcap("judge", tmp_path / place, "--trust", "--device", "cpu")
    assert (done.code, words in done.err, len(done.err.splitlines())) == (2, True, 1), done.err


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("def run(x):\n    return x\n", None, "scale has 2 inputs"),
        ("import torch\ndef run(x, eps:\n    return x\n", 3, "was never closed"),
    ],
)
def test_a_file_that_is_no_solution_is_a_verdict_without_a_judge(task, tmp_path, kcap, text, line, words):
    (task() / "solution" / "solution.py").write_text(f"# definition: scale\n{text}")
    done = kcap("judge", tmp_path / "task", "--trust", "--json", "--reward", tmp_path / "reward.json")
    verdict = verdict_of(done)
    assert (done.code, verdict.status, words in verdict.reason) == (1, "COMPILE_ERROR", True)
    assert [one.line for one in verdict.compiler] == ([line] if line else [])
    assert orjson.loads((tmp_path / "reward.json").read_bytes()) == {"reward": 0.0}
    assert not (tmp_path / "journal").exists()


def test_code_from_elsewhere_needs_trust(kcap, task):
    done = kcap("judge", task(), "--device", "cpu")
    assert (done.code, "--trust" in done.err) == (2, True)


def test_the_schema_is_the_one_that_is_published_and_every_verdict_is_of_it(kcap, judge):
    published = Path(__file__).parents[2] / "schemas" / "json" / "verdict.schema.json"
    done = kcap("judge", "--schema")
    assert (done.code, orjson.loads(done.out)) == (0, orjson.loads(published.read_bytes()))
    document = orjson.loads(judge("--json").out)
    assert set(document) == set(orjson.loads(done.out)["properties"])


def test_profiling_without_a_gpu_is_a_note_and_nothing_else(judge):
    done = judge("--profile", "--json")
    assert (done.code, verdict_of(done).notes) == (0, ["--profile: counters are a GPU's, and this was judged on cpu"])


def served(tmp_path, *requests):
    """What a warm judge answers to `requests`."""
    answers = []
    opened = open_task(tmp_path / "task", trust=True)
    with WarmJudge(opened, JudgeOptions(device="cpu")) as warm:
        lines = io.BytesIO(b"".join(one if isinstance(one, bytes) else orjson.dumps(one) + b"\n" for one in requests))
        serve(warm, lines, answers.append)
    return answers


def test_a_warm_judge_answers_a_line_for_each_workload_and_then_the_verdict(task, tmp_path):
    task()
    write_solution(tmp_path / "task" / "solution" / "solution.py", us=5)
    answers = served(tmp_path, {"id": 7}, {"id": "x", "quick": True})
    assert [(one["event"], one.get("id")) for one in answers] == [
        ("ready", None),
        *[("workload", 7)] * 3,
        ("verdict", 7),
        ("workload", "x"),
        ("verdict", "x"),
    ]
    assert VERDICT_ADAPTER.validate_python(answers[4]["verdict"]).status == "PASSED"
    processes = {line.split()[0] for line in (tmp_path / "journal").read_text().splitlines()}
    assert len(processes) == 1


def test_a_bad_request_is_answered_and_the_next_one_judged(task, tmp_path):
    task()
    source = '# {"us": 5}\ndef run(x, eps):\n    return x\n'
    requests = [
        b"{\n",
        {"id": 2, "quik": 1},
        {"id": 3, "source": "def run("},
        {"id": 5, "path": "/etc/passwd"},
        {"id": 6, "path": "\0"},
        {"id": 7, "path": "a" * 5000},
        {"id": 4, "source": source, "quick": True},
    ]
    answers = served(tmp_path, *requests)[1:]
    assert [(one["event"], one["id"]) for one in answers] == [
        ("error", None),
        ("error", 2),
        ("verdict", 3),
        ("verdict", 5),
        ("error", 6),
        ("error", 7),
        ("workload", 4),
        ("verdict", 4),
    ]


def test_a_path_in_a_request_is_the_tasks_or_the_callers(task, tmp_path, monkeypatch):
    root = task()
    write_solution(root / "solution" / "solution.py", status="TIMEOUT")
    monkeypatch.chdir(tmp_path)
    write_solution(tmp_path / "mine.py", us=5)
    answers = served(tmp_path, {"path": "solution/solution.py", "quick": True}, {"path": "mine.py", "quick": True})
    verdicts = [one["verdict"]["status"] for one in answers if one["event"] == "verdict"]
    assert verdicts == ["TIMEOUT", "PASSED"]


def test_only_answers_come_on_standard_output(task):
    root = task()
    program = (
        "import os, sys\nfrom functools import partial\nfrom kcap.bench.run.executors import SlotRequest\n"
        "from kcap.bench.tasks import warm_judge\n"
        "def noisy(*args, **options):\n"
        "    os.write(1, b'a library greets')\n"
        "    return SlotRequest(*args, **options, module='fake_judge')\n"
        "warm_judge.SlotRequest = noisy\n"
        "from kcap.cli import main\nmain(sys.argv[1:])"
    )
    write_solution(root / "solution" / "solution.py", us=5)
    command = [sys.executable, "-c", program, "judge", str(root), "--trust", "--device", "cpu", "--serve"]
    done = subprocess.run(command, input=b'{"id":1}\n', capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [orjson.loads(line)["event"] for line in done.stdout.splitlines()][-1] == "verdict"


def test_an_mcp_client_gets_the_verdict_and_the_reason_of_a_bad_call(task, tmp_path):
    pytest.importorskip("mcp")
    from kcap.bench.tasks.mcp_server import JudgeThread, make_server

    root = task()
    write_solution(root / "solution" / "solution.py", us=5)
    judge = JudgeThread(open_task(root, trust=True), JudgeOptions(device="cpu"))

    async def ask():
        server = make_server(judge)
        assert {tool.name for tool in await server.list_tools()} == {"task", "judge_solution"}
        right = await server.call_tool("judge_solution", {"quick": True})
        with pytest.raises(Exception, match="no such Solution"):
            await server.call_tool("judge_solution", {"path": "none.py"})
        return right, await server.call_tool("task", {})

    try:
        right, page = asyncio.run(ask())
    finally:
        judge.close()
    assert '"status": "PASSED"' in str(right) or "'status': 'PASSED'" in str(right)
    assert "Write a faster scale" in str(page)


def test_without_its_package_mcp_names_what_to_install(kcap, task, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    done = kcap("judge", task(), "--trust", "--mcp")
    assert (done.code, done.err) == (2, "kcap: --mcp needs the package mcp: pip install 'kcap[mcp]'\n")

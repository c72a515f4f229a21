"""`kcap task`: what lies in a task's folder, in each form; what is kept back; and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib

import orjson
import pytest
import torch
import yaml
from bench_datasets import SCALE, counted, workload, write_small
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.tasks.draft import choose_held_out
from kcap.bench.tasks.folder import find_task, open_task
from kcap.bench.tasks.forms import form_names
from kcap.errors import CallError
from kcap.schemas.flashinfer.dataset import Dataset, write_dataset
from kcap.schemas.flashinfer.definition import ScalarInput
from kcap.schemas.recording.recording import write_recording
from kcap.schemas.recording.records import Argument, Call, Count, Launch, Metadata
from kcap.schemas.recording.values import TensorSpec
from kcap.schemas.results.measurement import Measurement, Roofline, write_measurements
from kcap.schemas.results.task import TASK_ADAPTER

EPS = ScalarInput(value=0.5)
SIZES = {"s1": 2, "s2": 3, "s3": 5, "s4": 8}
COUNTS = {"s1": 10, "s2": 30, "s3": 2, "s4": 1}


@pytest.fixture
def dataset(tmp_path):
    """`scale` on four Workloads."""
    workloads = {"scale": [workload(SCALE, uuid, m=size, eps=EPS) for uuid, size in SIZES.items()]}
    counts = [counted(SCALE, uuid, count, call) for call, (uuid, count) in enumerate(COUNTS.items())]
    write_dataset(tmp_path / "dataset", [SCALE], workloads, {}, counts)
    return tmp_path / "dataset"


@pytest.fixture
def task(kcap, tmp_path):
    """Runs `kcap task` on the dataset; the output is `tmp_path / "task"`."""

    def run(*options, path=None, definition="scale"):
        args = ("--definition", definition, "-o", tmp_path / "task", "--trust", "--no-check")
        return kcap("task", path or tmp_path / "dataset", *args, *options)

    return run


def read_task(folder):
    return TASK_ADAPTER.validate_json((folder / "task.json").read_bytes())


def measured(path, times, floors=None):
    """Measurements of the dataset's Workloads."""
    lines = [
        Measurement(
            definition="scale",
            workload=uuid,
            operator="scale",
            count=COUNTS[uuid],
            median_us=us,
            method="host",
            device_name="CPU",
            threads=1,
            roofline=Roofline(us=floors[uuid], times=1, gb_s=1, tflop_s=1) if floors else None,
        )
        for uuid, us in times.items()
    ]
    write_measurements(path, lines)
    return path


def test_the_folder_has_all_that_a_reader_needs(task, dataset, tmp_path):
    done = task()
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "task").iterdir()} == {
        "instruction.md",
        "definition.json",
        "reference.py",
        "example.py",
        "solution",
        "workloads.jsonl",
        "task.json",
        "dataset",
        "SKILL.md",
    }
    assert (tmp_path / "task" / "solution" / "solution.py").read_text().startswith("# definition: scale\nimport torch")
    assert "kcap judge" in done.err


def test_workloads_come_with_the_engines_counts_the_most_counted_first(task, dataset, tmp_path):
    task()
    lines = [orjson.loads(line) for line in (tmp_path / "task" / "workloads.jsonl").read_bytes().splitlines()]
    assert [(line["workload"], line["counts"], line["axes"]) for line in lines] == [
        ("s2", {"decode": 30}, {"m": 3}),
        ("s1", {"decode": 10}, {"m": 2}),
        ("s3", {"decode": 2}, {"m": 5}),
        ("s4", {"decode": 1}, {"m": 8}),
    ]
    assert sum(line["share"] for line in lines) == pytest.approx(1)


def test_only_the_most_counted_are_taken_where_so_many_are_wanted(task, dataset, tmp_path):
    task("--workloads", 2)
    assert [one.workload for one in read_task(tmp_path / "task").workloads] == ["s2", "s1"]
    assert [one.uuid for one in open_task(tmp_path / "task", trust=True).workloads] == ["s2", "s1"]


def test_times_and_floors_of_the_engine_say_what_could_be_gained(task, dataset, tmp_path):
    times = {"s1": 10.0, "s2": 20.0, "s3": 30.0, "s4": 40.0}
    path = measured(tmp_path / "times.jsonl", times, {"s1": 5.0, "s2": 10.0, "s3": 60.0, "s4": 40.0})
    done = task("--measurements", path)
    made = read_task(tmp_path / "task")
    assert made.workloads[0].engine_us == {"decode": 20.0}
    room = made.room["decode"]
    assert room.engine_us == pytest.approx(30 * 20 + 10 * 10 + 2 * 30 + 40)
    assert room.floor_us == pytest.approx(30 * 10 + 10 * 5 + 2 * 30 + 40)  # a floor above the time gains nothing
    assert (room.total_us, room.share) == (room.engine_us, pytest.approx(350 / 800))
    assert "43.8% of all that was measured" in done.out
    text = (tmp_path / "task" / "instruction.md").read_text()
    assert "at most 350.00 µs can be gained, 43.8% of 800.00 µs" in text
    assert "| s2 | m 3 | 30 | 69.8% | 20.00 | 10.00 |" in text


def test_blobs_of_the_workloads_go_with_the_task_and_no_others(task, tmp_path):
    write_small(tmp_path / "dataset")
    task(definition="lookup")
    held = Dataset.load_problems(tmp_path / "task" / "dataset")
    (first, _) = held.workloads["lookup"]
    assert held.blob(first.inputs["rows"]).dtype == torch.int32
    assert list(held.definitions) == ["lookup"]
    assert {count.definition for count in held.counts} == {"lookup"}


def test_what_is_kept_back_is_in_no_file_of_the_folder(task, dataset, tmp_path):
    done = task("--held-out", 2, "--held-out-to", tmp_path / "kept")
    assert done.code == 0, done.err
    opened = open_task(tmp_path / "task", trust=True)
    shown, kept = ([one.uuid for one in ws] for ws in (opened.workloads, opened.held_out.workloads["scale"]))
    assert (len(shown), len(kept), shown[0]) == (2, 2, "s2")
    text = b"".join(path.read_bytes() for path in (tmp_path / "task").rglob("*") if path.is_file()).decode()
    assert [uuid for uuid in kept if f'"{uuid}"' in text or f"| {uuid} |" in text] == []
    assert "2 more Workloads are kept back" in text
    assert os.stat(tmp_path / "kept").st_mode & 0o777 == 0o700


def test_a_task_without_its_kept_back_workloads_says_so(task, dataset, tmp_path):
    task("--held-out", 1, "--held-out-to", tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    assert "not on this machine" in open_task(tmp_path / "task", trust=True).held_out_note
    assert open_task(tmp_path / "task", True, tmp_path / "elsewhere").held_out is not None


def test_workloads_kept_back_from_another_task_are_refused(task, dataset, tmp_path):
    task("--held-out", 1, "--held-out-to", tmp_path / "kept")
    (tmp_path / "task").rename(tmp_path / "first")
    task("--held-out", 2, "--held-out-to", tmp_path / "more")
    with pytest.raises(CallError, match="another task"):
        open_task(tmp_path / "task", True, tmp_path / "kept")


@given(st.lists(st.text("abcdef0123456789", min_size=4), unique=True, min_size=1, max_size=30), st.data())
def test_as_many_are_kept_back_as_asked_for_and_never_the_most_counted(uuids, data):
    number = data.draw(st.integers(0, len(uuids) - 1))
    kept = choose_held_out(uuids, number)
    assert len(set(kept)) == number
    assert set(kept) <= set(uuids[1:])
    assert kept == choose_held_out(uuids, number)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--held-out", 4, "--held-out-to", "kept"), "one at least has to be left"),
        (("--held-out", 1), "go together"),
        (("--measurements", "nothing"), "no such file"),
        (("--held-out", 1, "--held-out-to", "{task}/kept"), "outside"),
    ],
)
def test_a_wrong_call_is_one_line_and_writes_nothing(task, dataset, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    done = task(*(str(option).replace("{task}", str(tmp_path / "task")) for option in options))
    assert (done.code, words in done.err, len(done.err.splitlines())) == (2, True, 1), done.err
    assert not (tmp_path / "task").exists() and not (tmp_path / "kept").exists()


def test_an_unknown_definition_is_answered_with_those_that_are_near(task, dataset):
    done = task(definition="scael")
    assert (done.code, "did you mean scale?" in done.err) == (2, True)


def test_without_a_definition_those_that_there_are_are_listed(kcap, dataset):
    done = kcap("task", dataset, "--trust")
    assert (done.code, done.out.split()[-4:]) == (0, ["43", "4", "test", "scale"])


@pytest.mark.parametrize("name", ["thesis.txt", "task.toml", "config.yaml", "instruction.md"])
def test_a_folder_that_kcap_task_did_not_make_is_never_replaced(task, dataset, tmp_path, name):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / name).write_text("years")
    assert (task("--force").code, (tmp_path / "task" / name).read_text()) == (2, "years")


@pytest.mark.parametrize("form", form_names())
def test_a_task_of_any_form_is_replaced_by_force_alone(task, dataset, tmp_path, form):
    assert task("--form", form).code == 0
    (tmp_path / "task" / "stale").write_text("")
    assert (task("--form", form).code, task("--form", form, "--force").code) == (2, 0)
    assert not (tmp_path / "task" / "stale").exists()


@pytest.mark.alone
def test_the_example_passes_by_the_judge(kcap, dataset, tmp_path):
    args = ("--definition", "scale", "-o", tmp_path / "task", "--trust", "--device", "cpu")
    done = kcap("task", dataset, *args)
    assert done.code == 0, done.err
    assert read_task(tmp_path / "task").example == "PASSED"


@pytest.mark.alone
def test_an_example_that_does_not_pass_is_said_and_the_task_stays(kcap, tmp_path):
    broken = SCALE.model_copy(update={"reference": "def run(x, eps):\n    return 1 / 0\n"})
    write_dataset(tmp_path / "dataset", [broken], {"scale": [workload(SCALE, "s1", eps=EPS)]}, {})
    args = ("--definition", "scale", "-o", tmp_path / "task", "--trust", "--device", "cpu")
    done = kcap("task", tmp_path / "dataset", *args)
    assert (done.code, "the example does not pass here" in done.err) == (3, True)
    assert read_task(tmp_path / "task").example not in ("PASSED", None)


def test_a_dataset_from_elsewhere_needs_trust(kcap, dataset, tmp_path):
    done = kcap("task", dataset, "--definition", "scale", "-o", tmp_path / "task")
    assert (done.code, "--trust" in done.err) == (2, True)


@pytest.mark.parametrize("place", ["definitions/test/scale.json", "workloads/test/scale.jsonl"])
def test_a_task_whose_dataset_was_changed_is_refused(task, dataset, tmp_path, place):
    task()
    path = tmp_path / "task" / "dataset" / place
    path.write_text(path.read_text().replace("x * eps", "x * 0").replace('"m":3', '"m":1'))
    with pytest.raises(CallError, match="not the one that kcap task wrote"):
        open_task(tmp_path / "task", trust=True)


def test_a_changed_blob_is_found_too(task, tmp_path):
    write_small(tmp_path / "dataset")
    task(definition="lookup")
    (first, *_) = sorted((tmp_path / "task" / "dataset" / "blob").rglob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CallError, match="not the one that kcap task wrote"):
        open_task(tmp_path / "task", trust=True)


def test_a_task_is_found_from_any_file_in_it(task, dataset, tmp_path):
    task()
    assert find_task(tmp_path / "task" / "solution" / "solution.py") == tmp_path / "task"
    with pytest.raises(CallError, match="--task"):
        find_task(tmp_path / "dataset")


def test_harbors_form_has_its_files_and_keeps_the_tests_apart(task, dataset, tmp_path):
    done = task("--form", "harbor", "--held-out", 1, "--held-out-to", tmp_path / "kept")
    assert done.code == 0, done.err
    root = tmp_path / "task"
    settings = tomllib.loads((root / "task.toml").read_text())
    assert settings["task"]["name"] == "kcap/scale"
    assert settings["verifier"]["timeout_sec"] > 0 and settings["environment"]["gpus"] in (0, 1)
    assert "COPY task /app/task" in (root / "environment" / "Dockerfile").read_text()
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert os.access(root / script, os.X_OK)
        assert subprocess.run(["bash", "-n", root / script], check=False).returncode == 0
    assert (root / "tests" / "held_out" / "held_out.json").is_file()
    assert not list((root / "environment").rglob("held_out.json"))
    for copy in ("environment/task", "tests/task"):
        assert open_task(root / copy, trust=True).name == "scale"


def test_the_arenas_form_has_what_its_parser_wants(task, dataset, tmp_path):
    done = task("--form", "agentkernelarena")
    assert done.code == 0, done.err
    config = yaml.safe_load((tmp_path / "task" / "config.yaml").read_text())
    assert config["schema_version"] == 2
    assert config["candidate"]["editable"] == ["source/solution.py"]
    paths = [config["evaluation"]["workloads"], *config["instructions"], *config["candidate"]["editable"]]
    assert all((tmp_path / "task" / path).is_file() for path in paths)


def arena(folder, *arguments, verdict=None):
    """The runner's answer, where `kcap judge` prints `verdict`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "verdict.json").write_text(json.dumps(verdict) if verdict else "")  # it fails
    (bin_folder / "kcap").write_text(f"#!/bin/sh\ncat {bin_folder}/verdict.json\n")
    (bin_folder / "kcap").chmod(0o755)
    command = [sys.executable, "scripts/evaluate.py", *arguments]
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ARENA_EVAL_RESULT=")]
    answer = json.loads(line.removeprefix("ARENA_EVAL_RESULT="))
    assert answer["protocol"] == "arena-eval-v1"
    assert (done.returncode == 0) == (answer["status"] == "PASS")
    return answer


def one(uuid, status="PASSED", method="graph"):
    time = {"median_us": 12.0, "method": method} if status == "PASSED" else None
    return {"workload": uuid, "status": status, "time": time, "speedup": 2.0}


def test_the_arenas_runner_lists_the_cases_and_answers_with_the_same(task, dataset, tmp_path):
    task("--form", "agentkernelarena")
    listed = arena(tmp_path / "task", "validate-task")
    assert (listed["role"], listed["metadata"]) == ("task", {"candidate_state": "implemented"})
    verdict = {"status": "PASSED", "workloads": [one(uuid) for uuid in SIZES]}
    timed = arena(tmp_path / "task", "candidate", "performance", verdict=verdict)
    assert {case["test_case_id"]: case["params"] for case in timed["cases"]} == {
        case["test_case_id"]: case["params"] for case in listed["cases"]
    }
    assert timed["cases"][0]["execution_time_ms"] == 0.012
    assert timed["cases"][0]["benchmark_method"] == "cuda_graph"


@pytest.mark.parametrize("verdict", [{"status": "COMPILE_ERROR", "reason": "no valid Python", "workloads": []}, None])
def test_the_arena_is_told_of_every_case_also_where_none_was_judged(task, dataset, tmp_path, verdict):
    task("--form", "agentkernelarena")
    listed = arena(tmp_path / "task", "validate-task")["cases"]
    answer = arena(tmp_path / "task", "candidate", "correctness", verdict=verdict)
    assert answer["failure_kind"] == ("compile_error" if verdict else "not_judged")
    assert [case["test_case_id"] for case in answer["cases"]] == [case["test_case_id"] for case in listed]
    assert answer["status"] == "FAIL" and all(case["status"] == "FAIL" for case in answer["cases"])


def test_the_arena_is_told_of_wrong_numbers_and_of_times_that_are_no_gpus(task, dataset, tmp_path):
    task("--form", "agentkernelarena")
    wrong = {"status": "INCORRECT_NUMERICAL", "reason": "y: off", "workloads": [one("s1", "INCORRECT_NUMERICAL")]}
    answer = arena(tmp_path / "task", "baseline", "correctness", verdict=wrong)
    assert (answer["status"], answer["failure_kind"]) == ("FAIL", "numerical_mismatch")
    host = {"status": "PASSED", "workloads": [one("s1", method="host")]}
    answer = arena(tmp_path / "task", "candidate", "performance", verdict=host)
    assert (answer["status"], "GPU" in answer["reason"]) == ("FAIL", True)


def test_flashinfer_benchs_form_is_a_valid_dataset_with_the_example(task, kcap, dataset, tmp_path):
    assert task("--form", "flashinfer-bench").code == 0
    assert kcap("validate", tmp_path / "task").code == 0
    (example,) = Dataset.load(tmp_path / "task").solutions["scale"]
    assert (example.author, example.spec.destination_passing_style) == ("baseline", False)


def test_a_recordings_task_has_what_was_recorded(kcap, everything, tmp_path):
    done = kcap("task", everything)
    name = next(line.split()[-1] for line in done.out.splitlines() if " mm " in line or "gemm" in line)
    args = ("--definition", name, "-o", tmp_path / "task", "--no-check", "--device", "cpu")
    assert kcap("task", everything, *args).code == 0
    made = read_task(tmp_path / "task")
    assert (made.model, made.framework, made.recorded_on) == ("kcap/tiny", "vLLM", "NVIDIA H200")
    assert [(kernel.operator, kernel.invocations) for kernel in made.kernels] == [("aten::mm", 100)]
    assert made.workloads[0].counts == {"prefill": 30, "decode": 70}
    open_task(tmp_path / "task", trust=False)  # sealed: it was exported here


def test_a_task_is_valid_as_a_whole_and_in_its_files(task, kcap, dataset, tmp_path):
    path = measured(tmp_path / "times.jsonl", {"s1": 10.0})
    task("--held-out", 1, "--held-out-to", tmp_path / "kept", "--measurements", path)
    whole = kcap("validate", tmp_path / "task")
    assert (whole.code, whole.out) == (0, f"{tmp_path / 'task'}: valid, a task\n")
    for file in (tmp_path / "task" / "task.json", tmp_path / "kept" / "held_out.json"):
        assert kcap("validate", file).code == 0
    (tmp_path / "task" / "dataset" / "workloads" / "test" / "scale.jsonl").write_text("{}\n")
    assert kcap("validate", tmp_path / "task").code == 1


SOURCE = b"import triton\n\n\ndef fused_mul(in_ptr0, out_ptr0, xnumel, XBLOCK): ...\n"
FRAGMENT = b"""%arg0_1 : Tensor "f32[s0, 8][8, 1]cpu" = PlaceHolder[target=arg0_1]
%mul : Tensor "f32[s0, 8][8, 1]cpu"[num_users=1] = \
call_function[target=torch.ops.aten.mul.Tensor](args = (%arg0_1, %arg0_1), kwargs = {})
return %mul
call(arg0_1, mul, s0)
"""


def launched(number, rows, operator="triton::fused_mul.s0123abcd"):
    tensors = {n: TensorSpec((rows, 8), "float32", storage=i) for i, n in enumerate(("in_ptr0", "out_ptr0"))}
    launch = Launch(
        function="fused_mul",
        kernel=f"{hashlib.sha256(SOURCE).hexdigest()}.py",
        fragment=f"{hashlib.sha256(FRAGMENT).hexdigest()}.txt",
        grid=[rows, 1, 1],
        constexprs={"XBLOCK": 8},
        num_warps=4,
    )
    arguments = [Argument(name=n, value=v) for n, v in {**tensors, "xnumel": rows * 8}.items()]
    counts = [Count(phase="decode", count=10 * rows)]
    return Call(id=number, operator=operator, args=arguments, launch=launch, counts=counts)


def recorded_launches(path, *calls):
    kernels = {
        f"{hashlib.sha256(SOURCE).hexdigest()}.py": SOURCE,
        f"{hashlib.sha256(FRAGMENT).hexdigest()}.txt": FRAGMENT,
    }
    write_recording(path, Metadata(), calls, kernels=kernels)
    return path


@pytest.fixture
def launched_task(task, kcap, tmp_path):
    """Runs `kcap task` on the one Definition of these Calls; gives its kernel as task.json has it."""

    def run(*calls):
        path = recorded_launches(tmp_path / "r.kcap", *calls)
        name = kcap("task", path).out.split()[-1]
        done = task("--device", "cpu", path=path, definition=name)
        assert done.code == 0, done.err
        (kernel,) = read_task(tmp_path / "task").kernels
        return kernel

    return run


def test_the_engines_triton_kernel_is_in_the_folder_with_how_it_was_launched(launched_task, tmp_path):
    kernel = launched_task(launched(0, 3), launched(1, 5))
    assert (tmp_path / "task" / kernel.source).read_bytes() == SOURCE
    assert (kernel.language, kernel.invocations) == ("triton", 80)
    assert [launch["grid"] for launch in kernel.launches] == [[3, 1, 1], [5, 1, 1]]
    assert kernel.launches[0]["num_warps"] == 4
    assert f"`{kernel.source}`" in (tmp_path / "task" / "instruction.md").read_text()


def test_a_kernel_whose_source_was_not_read_is_named_without_it(launched_task, tmp_path):
    call = launched(0, 3)
    launch = call.launch.model_copy(update={"kernel": None, "unread": "no file"})
    kernel = launched_task(call.model_copy(update={"launch": launch}))
    assert kernel.source is None and not (tmp_path / "task" / "baseline").exists()
    assert "triton, without its source" in (tmp_path / "task" / "instruction.md").read_text()


def test_a_compiled_library_is_no_source(launched_task, tmp_path):
    tensors = [TensorSpec(shape, "bfloat16", storage=i) for i, shape in enumerate(((3, 8), (8,), (3, 8)))]
    args = [Argument(name=f"arg{place}", value=value) for place, value in enumerate((*tensors, 1e-5))]
    launch = Launch(language="tvm", function="rmsnorm", kernel=f"{hashlib.sha256(SOURCE).hexdigest()}.py")
    counts = [Count(phase="decode", count=10)]
    kernel = launched_task(Call(id=0, operator="tvm::rmsnorm", args=args, launch=launch, counts=counts))
    assert (kernel.language, kernel.source, kernel.invocations) == ("tvm", None, 10)
    assert not (tmp_path / "task" / "baseline").exists()


def test_an_operators_name_is_no_way_out_of_the_folder(launched_task, tmp_path):
    kernel = launched_task(launched(0, 3, operator="triton::../../evil.s0123abcd"))
    assert (tmp_path / "task" / kernel.source).resolve().parent == tmp_path / "task" / "baseline"

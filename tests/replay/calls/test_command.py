"""`kcap replay` as its user sees it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from handmade import Values, call, tensor

from kcap.replay.jobs import Choice
from kcap.replay.source import open_source
from kcap.schemas.recording.recording import Call, Sample
from kcap.schemas.recording.values import Drift
from kcap.schemas.results.measurement import Measurement, read_measurements

Write = Callable[..., Path]
MM = call("aten::mm", tensor(8, 8), tensor(8, 8, storage=1), count=7)
VIEW = call("aten::view", tensor(8, 8), [64], id=1, count=9, work=False)
REGION = call("vllm::unified_attention", tensor(8, 8), id=2, count=9, kind="region")


def kcap(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcap", "replay", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def outcome(path: Path, *args: object) -> tuple[int, dict[str, object]]:
    done = kcap(path, "--json", "--seconds", "0.001", *args)
    assert done.stdout, done.stderr
    return done.returncode, orjson.loads(done.stdout)


def test_kernels_are_timed_and_regions_and_views_left_out(recorded: Write, tmp_path: Path) -> None:
    path = recorded([MM, VIEW, REGION])
    out = tmp_path / "m.jsonl"
    done = kcap(path, "--seconds", "0.01", "-o", out)
    assert done.returncode == 0, done.stderr
    assert "aten::mm" in done.stdout
    assert done.stderr.splitlines()[-1] == f"Next: kcap show {path}"
    assert "replayed 7 of 7 invocations (100.0%), 1 of 1 distinct calls" in done.stdout
    (measurement,) = read_measurements(out)
    assert (measurement.status, measurement.call, measurement.count, measurement.method) == ("ok", 0, 7, "host")
    assert measurement.median_us and len(measurement.samples_us) >= 1
    assert measurement.q1_us <= measurement.median_us <= measurement.q3_us  # type: ignore[operator]
    assert measurement.device_name and measurement.torch and measurement.threads


def test_all_adds_views_and_never_regions(recorded: Write) -> None:
    code, result = outcome(recorded([MM, VIEW, REGION]), "--include-views")
    assert code == 0
    assert [c["operator"] for c in calls_of(result)] in (["aten::mm", "aten::view"], ["aten::view", "aten::mm"])


def test_a_skipped_call_says_why_and_exits_3(recorded: Write) -> None:
    code, result = outcome(recorded([MM, call("nobody::kernel", tensor(2), id=1, count=3)]))
    assert code == 3
    assert result["replayed"] == {"calls": 1, "count": 7, "share": 0.7}
    (reason,) = result["skipped"].pop("reasons")  # type: ignore[attr-defined]
    assert result["skipped"] == {"calls": 1, "count": 3, "share": 0.3}
    assert "no library is known" in reason["reason"]
    assert result["gpu_time_us"] == 0 < result["host_time_us"]  # type: ignore[operator]


def test_a_call_of_several_sizes_is_told(recorded: Write) -> None:
    many = call("aten::relu", tensor(4, 4), shapes=3)
    done = kcap(recorded([many]), "--seconds", "0.001")
    assert "of several sizes, and timed at that of the first: 1 distinct call, " in done.stdout + done.stderr


def test_a_failed_call_exits_1_and_the_rest_is_timed(recorded: Write) -> None:
    code, result = outcome(recorded([call("aten::mm", tensor(8, 8), tensor(9, 9, storage=1), id=1), MM]))
    assert code == 1
    assert [part["count"] for part in (result["replayed"], result["skipped"], result["failed"])] == [7, 0, 5]  # type: ignore[index]


def test_a_call_is_timed_on_the_samples_of_its_phase(recorded: Write, tmp_path: Path) -> None:
    drifting = Call.model_validate(
        {
            **call("aten::fill_.Scalar", tensor(8), Drift("int")).model_dump(),
            "counts": [{"phase": "prefill", "count": 2}, {"phase": "decode", "count": 3}],
        }
    )
    samples = [Sample(call=0, phase=p, scalars={"1": v}) for p, v in (("prefill", 1), ("decode", 2), ("decode", 2))]
    samples.insert(1, Sample(call=0, phase="decode", scalars={"1": 3}, compared=True))
    path = recorded([drifting], samples)
    assert measured(path, tmp_path / "all.jsonl") == [(0, ["prefill"], 5), (2, ["decode"], 5)]
    (job,) = open_source(path, Choice(phase="decode"), keep_going=False).jobs
    assert ([(g.index, g.phases) for g in job.groups], job.count) == ([(2, ["decode"])], 3)


def test_a_sample_that_was_skipped_is_told_by_the_exit_code(recorded: Write) -> None:
    drifting = call("aten::fill_.Scalar", tensor(8), Drift("int"))
    samples = [Sample(call=0, phase="decode", scalars={"1": 2}), Sample(call=0, phase="decode")]
    code, result = outcome(recorded([drifting], samples))
    (row,) = calls_of(result)
    assert (code, row["status"]) == (3, "ok")
    assert "no Sample holds the value of its argument 1" in str(row["reason"])


def measured(path: Path, out: Path, *args: object) -> list[tuple[int | None, list[str], int]]:
    assert kcap(path, "-o", out, "--seconds", "0.001", *args).returncode == 0
    lines: list[Measurement] = list(read_measurements(out))
    return [(m.sample, list(m.phases), m.count) for m in lines]


def test_recorded_indices_reach_the_operator(recorded: Write, values: Values) -> None:
    """An index beyond the table fails in the operator, so the recorded value must have arrived there."""
    embedding = call("aten::embedding", tensor(4, 2), tensor(2, dtype="int64", storage=1))
    inside = Sample(call=0, phase="decode", tensors={"1": values([0, 3])})
    outside = Sample(call=1, phase="decode", tensors={"1": values([0, 4])})
    again = embedding.model_copy(update={"id": 1})
    code, result = outcome(recorded([embedding, again], [inside, outside]))
    assert code == 1
    assert [c["status"] for c in calls_of(result)] == ["ok", "failed"]
    assert "index out of range" in str(calls_of(result)[1])


def test_indices_of_a_recording_without_its_values_are_drawn(recorded: Write, values: Values) -> None:
    embedding = call("aten::embedding", tensor(4, 2), tensor(2, dtype="int64", storage=1))
    path = recorded([embedding], [Sample(call=0, phase="decode", tensors={"1": values([0, 4])})])
    shutil.rmtree(path / "values")
    code, result = outcome(path)
    assert (code, [c["status"] for c in calls_of(result)]) == (0, ["ok"])
    shown = subprocess.run([sys.executable, "-m", "kcap", "show", str(path)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("device", ["0", "cuda:", "gpu"])
def test_a_device_of_no_known_name_is_refused(device: str) -> None:
    done = kcap("nothing", "--device", device)
    assert (done.returncode, "not a device that kcap knows" in done.stderr) == (2, True)


def test_op_globs_and_top_choose_calls(recorded: Write) -> None:
    relu = call("aten::relu", tensor(8), id=1, count=3)
    path = recorded([MM, relu, call("aten::round", tensor(8), id=2, count=2)])
    assert [c["operator"] for c in calls_of(outcome(path, "--op", "aten::r*", "--top", 1)[1])] == ["aten::relu"]


def calls_of(result: dict[str, object]) -> list[dict[str, object]]:
    found = result["calls"]
    assert isinstance(found, list)
    return found


def test_a_trace_file_replays_with_its_devices_mapped(tmp_path: Path) -> None:
    trace = tmp_path / "t.txt"
    trace.write_text(
        "Operator: aten.mm.default\n"
        "cnt: 2, ((T([4, 4], f32), T([4, 4], f32)), {})\n"
        "cnt: 1, ((T([4, 4], f32), T([4, 4], f32)), {})\n"
        "Operator: aten.new_zeros.default\ncnt: 1, ((T([4], f32), [4]), {'dtype': f16, 'device': 'cuda'})\n"
    )
    code, result = outcome(trace, "--device", "cpu")
    assert code == 0
    assert sorted((c["operator"], c["count"]) for c in calls_of(result)) == [("aten::mm", 3), ("aten::new_zeros", 1)]


BAD = "Operator: aten.mm.default\ncnt: 2, ((T([4, 4], f32), T([4, 4], f32)), {})\ncnt: 1, ((__import__('os'),), {})\n"


def test_a_bad_trace_line_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    trace = tmp_path / "t.txt"
    trace.write_text(BAD)
    done = kcap(trace, "--device", "cpu")
    assert done.returncode == 1
    assert re.search(r"t\.txt:3:\d+: ", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    code, result = outcome(trace, "--device", "cpu", "--keep-going")
    assert (code, result["bad_lines"]) == (3, 1)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nothing-here"], 2, "no such Recording"),
        (["REC", "--keep-going"], 2, "is no trace file: --keep-going is of the lines of one"),
        (["REC", "--device", "tpu"], 2, "--device tpu"),
        (["REC", "--op", "nothing*"], 2, "kcap show"),
        (["REC", "--phase", "mixed"], 2, "kcap show"),
        (["EMPTY"], 2, "holds no calls"),
        (["DAMAGED"], 1, "calls.jsonl:1"),
        (["BARE"], 1, "not a Recording"),
        (["REC", "-o", "REC/recording.json"], 2, "--force"),
        (["REC", "-o", "no/such/folder/m.jsonl"], 1, "No such file"),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(
    recorded: Write, tmp_path: Path, kcap: Callable[..., Any], args: list[str], code: int, words: str
) -> None:
    path = recorded([] if args[0] == "EMPTY" else [MM])
    if args[0] == "DAMAGED":
        (path / "calls.jsonl").write_text('{"id": -1}\n')
    if args[0] == "BARE":
        (path / "recording.json").unlink()
    first = path if args[0].isupper() else args[0]
    done = kcap("replay", first, *[arg.replace("REC", str(path)) for arg in args[1:]])
    assert done.code == code, done.err
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not done.out


def test_cuda_without_a_gpu_says_what_to_pass(recorded: Write) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = kcap(recorded([MM]), "--device", "cuda")
    assert done.returncode == 2
    assert "pass --device cpu" in done.stderr


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error
import kcap.commands.replay, kcap.system.worker_process
from kcap.cli import main
main(["replay", "--help"])
"""


def test_the_help_and_the_parents_side_of_a_worker_need_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    for spellings in ("--include-views, --all", "--kernel-durations, --kernels", "--compare-engine, --fidelity"):
        assert spellings in done.stdout

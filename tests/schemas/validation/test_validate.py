from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcap.schemas.backendbench.table import TableRow, write_table
from kcap.schemas.results import measurement
from kcap.schemas.results.measurement import Measurement
from kcap.schemas.validation.formats import FORMATS, detect_format
from kcap.schemas.validation.report import Report

Run = Callable[..., Any]
DATA = Path(__file__).parents[2] / "data"
DOCUMENTS = DATA / "documents"
PUBLISHED = DATA / "flashinfer-trace"
DEFINITION = PUBLISHED / "definitions" / "rmsnorm" / "rmsnorm_h128.json"
WORKLOADS = PUBLISHED / "workloads" / "rmsnorm" / "rmsnorm_h128.jsonl"
values = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
keys = st.text() | st.sampled_from(sorted({key for known in FORMATS.values() for key in known.keys}))
documents = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5))


def told(name: str, path: Path) -> list[str]:
    report = Report()
    FORMATS[name].check(report, path)
    return [str(problem).replace(str(path), path.name) for problem in report.problems]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "file"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (PUBLISHED, "dataset"),
        (DEFINITION, "definition"),
        (WORKLOADS, "workload"),
        (DOCUMENTS / "kernel_description_1.json", "kernel-description"),
        (DOCUMENTS / "kernel_description_3.json", "kernel-description"),
        (DOCUMENTS / "calling_record_1.json", "calling-record"),
        (DOCUMENTS / "agent_trace_3.json", "agent-trace"),
        (DOCUMENTS / "agent_trace_layout.json", "agent-trace"),
        (DOCUMENTS / "trace_file.txt", "trace-file"),
        # broken JSON is told by its keys
        (DOCUMENTS / "definition_2.json", "definition"),
        (DOCUMENTS / "definition_5.json", "definition"),
        (DOCUMENTS / "kernel_description_2.json", "kernel-description"),
        (DOCUMENTS / "kernel_description_6.json", "kernel-description"),
        (DOCUMENTS / "benchmark_result_1.json", "benchmark-result"),
        (DOCUMENTS / "benchmark_result_2.json", "benchmark-result"),
        (DOCUMENTS / "agent_trace_1.json", "agent-trace"),
        (DOCUMENTS / "README.md", None),
        (DOCUMENTS / "code.txt", None),
        (DOCUMENTS, None),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_a_format_is_told_by_the_content(path: Path, name: str | None) -> None:
    assert detect_format(path) == name


def test_the_files_of_a_recording_are_told_by_their_content(recording: Path) -> None:
    assert detect_format(recording) == "recording"
    lines = {
        "calls": '{"id": 0, "operator": "aten::mm", "args": [], "counts": []}',
        "programs": '{"id": 0, "calls": [0], "counts": []}',
        "steps": '{"index": 0, "phase": "decode", "tokens": 1, "program": 0}',
        "samples": '{"call": 0, "phase": "decode", "scalars": {"1": 3}}',
    }
    for table, line in lines.items():
        (recording / f"{table}.jsonl").write_text(line + "\n")
        assert detect_format(recording / f"{table}.jsonl") == f"recording-{table.removesuffix('s')}"
    assert detect_format(recording / "recording.json") == "recording-metadata"


def test_measurements_traces_solutions_and_tables_are_told_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    measurement.write_measurements(file, [Measurement(call=0, operator="aten::mm", median_us=1.0, samples_us=[1.0])])
    assert detect_format(file) == "measurement"
    evaluation = {"status": "TIMEOUT", "environment": {"hardware": "cpu"}, "timestamp": "now"}
    workload = {"uuid": "u", "axes": {}, "inputs": {}}
    file.write_bytes(orjson.dumps({"definition": "d", "solution": "s", "workload": workload, "evaluation": evaluation}))
    assert (detect_format(file), told("trace", file)) == ("trace", [])
    assert told("workload", file) == ["file:1: solution, evaluation: must be null in a Workload's line"]
    file.write_bytes(orjson.dumps({"name": "s", "definition": "d", "spec": {}, "sources": []}))
    assert detect_format(file) == "solution"
    write_table(file, [TableRow("aten.relu.default", "((T([2], f32),), {})", 3)])
    assert (detect_format(file), told("parquet", file)) == ("parquet", [])
    write_table(file, [TableRow("aten.relu.default", "((T([2], f32),), {}", 3)])
    assert told("parquet", file)[0].startswith("file:1:20: ")


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), content=st.binary() | documents.map(orjson.dumps))
def test_arbitrary_content_is_valid_or_has_problems(name: str, scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    told(name, scratch)
    assert detect_format(scratch) in (None, *FORMATS)


def test_valid_files_exit_0_and_say_what_they_are(kcap: Run) -> None:
    ran = kcap("validate", DEFINITION, WORKLOADS)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        f"{DEFINITION}: valid, a FlashInfer-Bench Definition",
        f"{WORKLOADS}: valid, FlashInfer-Bench Workloads, one a line",
    ]


def test_every_problem_of_every_file_is_printed_with_its_place(kcap: Run, tmp_path: Path) -> None:
    record, lines = tmp_path / "record.json", tmp_path / "lines.jsonl"
    record.write_text('{"model": 3, "framework": "vllm", "kernels": [{"id": "a", "count": -1}], "more": 1}')
    good = WORKLOADS.read_text().splitlines()[0]
    lines.write_text(f'{good}\n{{"definition": "d"}}\n\n{good}\n{{"definition": }}\n')
    ran = kcap("validate", record, lines, DEFINITION)
    assert ran.code == 1
    places = [line.removeprefix(f"{tmp_path}/") for line in ran.out.splitlines()]
    assert [tuple(place.split(": ")[:2]) for place in places[:-1]] == [
        ("record.json", "model"),
        ("record.json", "framework"),
        ("record.json", "kernels.0.count"),
        ("record.json", "more"),
        ("lines.jsonl:2", "workload"),
        ("lines.jsonl:5:16", "unexpected character, expected a JSON value"),
    ]
    assert places[-1].endswith("valid, a FlashInfer-Bench Definition")


def test_a_forced_format_says_what_keeps_the_file_from_being_it(kcap: Run) -> None:
    ran = kcap("validate", "--format", "calling-record", DEFINITION)
    assert ran.code == 1
    assert f"{DEFINITION}: kernels: Field required" in ran.out.splitlines()


def test_what_is_of_no_format_is_invalid_and_what_is_not_there_a_wrong_call(kcap: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    ran = kcap("validate", tmp_path / "notes")
    assert (ran.code, "no format that kcap knows" in ran.out, "--format" in ran.out) == (1, True, True)
    ran = kcap("validate", DEFINITION, tmp_path / "absent")
    assert (ran.code, ran.out, "absent: no such file" in ran.err) == (2, "", True)
    assert kcap("validate").code == 2
    assert kcap("validate", "--format", "elf", DEFINITION).code == 2


def test_json_has_the_problems_for_programs(kcap: Run, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(DEFINITION.read_text().replace('"const"', '"constant"'))
    ran = kcap("validate", "--json", tmp_path / "d.json", DOCUMENTS / "kernel_description_1.json")
    first, second = orjson.loads(ran.out)
    assert (ran.code, first["format"], first["valid"], second["valid"]) == (1, "definition", False, True)
    assert first["problems"][0]["place"] == f"{tmp_path}/d.json"
    assert first["problems"][0]["reason"].startswith("axes.hidden_size: ")
    assert [problem["severity"] for problem in second["problems"]] == ["warning"]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_names_and_keys_of_a_file_never_reach_the_terminal_as_they_are(
    kcap: Run, tmp_path: Path, option: tuple[str, ...]
) -> None:
    path = tmp_path / "d\udcff\x1b[31m.json"
    path.write_bytes(orjson.dumps(orjson.loads(DEFINITION.read_bytes()) | {"\x1b[2J\n": 1}))
    ran = kcap("validate", *option, path)
    assert ran.code == 1
    assert ran.out.replace("\\\\", "\\").count(r"d\udcff\x1b[31m.json") >= 1
    assert "\x1b" not in ran.out
    assert r"\x1b[2J\n: " in ran.out.replace("\\\\", "\\")


def test_a_trace_file_with_many_bad_lines_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Operator: aten.relu.default\n" + "cnt: x\n" * 150)
    problems = told("trace-file", tmp_path / "t.txt")
    assert (len(problems), problems[-1]) == (101, "t.txt: 50 more lines are wrong, too")


def test_a_recording_is_valid(recording: Path, kcap: Run) -> None:
    assert kcap("validate", recording).out == f"{recording}: valid, a Recording\n"


def appended(recording: Path, table: str, line: str) -> list[str]:
    with (recording / f"{table}.jsonl").open("a") as file:
        file.write(line + "\n")
    return [problem.removeprefix(f"{recording.name}/") for problem in told("recording", recording)]


@pytest.mark.parametrize(
    ("table", "line", "problem"),
    [
        ("calls", '{"id": 99, "operator": "aten::mm"}', "id: 99, but it is the number of the line, from 0: "),
        ("calls", '{"id": ', "unexpected end of data"),
        ("programs", '{"id": 1, "calls": [77], "graphs": [[0, 88]]}', "calls: a Call 77 that is not there"),
        ("programs", '{"id": 1, "calls": [77], "graphs": [[0, 88]]}', "graphs: a Program 88 that is not there"),
        ("steps", '{"index": 9, "phase": "decode", "program": 66}', "program: a Program 66 that is not there"),
        ("steps", '{"index": -1, "phase": "decoding"}', "index: "),
        ("steps", '{"index": -1, "phase": "decoding"}', "phase: "),
        ("samples", '{"call": 55, "phase": "decode"}', "call: a Call 55 that is not there"),
        (
            "samples",
            '{"call": 0, "phase": "decode", "tensors": {"0": {"file": "no.safetensors"}}}',
            "tensors.0: no.safetensors: not a readable safetensors file",
        ),
    ],
)
def test_what_is_wrong_in_a_recording_is_told(recording: Path, table: str, line: str, problem: str) -> None:
    (recording / "values").mkdir(exist_ok=True)
    problems = appended(recording, table, line)
    assert any(one.startswith(f"{table}.jsonl:") and problem in one for one in problems), problems


def test_a_recording_passed_on_without_its_values_is_valid(recording: Path) -> None:
    (recording / "values").rmdir()
    assert told("recording", recording) == [
        f"{recording.name}/values: warning: missing: replay draws the integers whose values were sampled"
    ]


def test_a_damaged_table_of_a_recording_leaves_the_others_checked(recording: Path) -> None:
    (recording / "steps.jsonl").unlink()
    problems = appended(recording, "samples", '{"call": 55, "phase": "decode"}')
    assert problems[0] == "steps.jsonl: cannot be read: No such file or directory"
    assert problems[1].endswith("call: a Call 55 that is not there")


@pytest.mark.parametrize("missing", [False, True], ids=["one line", "all"])
@pytest.mark.parametrize("table", ["calls", "programs", "requests"])
def test_what_is_damaged_is_told_once_and_not_by_all_that_name_it(recording: Path, table: str, missing: bool) -> None:
    with (recording / "programs.jsonl").open("a") as file:
        file.writelines(f'{{"id": {number}, "calls": [0, 1, 2]}}\n' for number in range(3))
    with (recording / "steps.jsonl").open("a") as file:
        step = '{{"index": {0}, "phase": "decode", "program": {0}, "requests": [0, 1]}}\n'
        file.writelines(step.format(number) for number in range(3))
    (recording / "requests.jsonl").write_text('{"prompt": 1, "computed": 1}\n' * 2)
    (recording / "values").mkdir(exist_ok=True)
    assert told("recording", recording) == []
    path = recording / f"{table}.jsonl"
    if missing:
        path.unlink()
    else:
        first, *others = path.read_text().splitlines(keepends=True)
        path.write_text(f"{first[:9]}\n{''.join(others)}")
    assert len(told("recording", recording)) == 1


def test_what_was_made_of_a_recording_is_checked_too(recording: Path) -> None:
    (recording / "calling_record.json").write_text("{}")
    (recording / "coverage.jsonl").write_text("{}\n")
    (recording / "trace.txt").write_text("cnt: 3, ((), {})\n")
    files = {problem.split("/")[1].split(":")[0] for problem in told("recording", recording)}
    assert files == {"calling_record.json", "coverage.jsonl", "trace.txt"}


def test_a_newer_recording_is_refused_by_its_format(recording: Path) -> None:
    file = recording / "recording.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | {"format": "9.0"}))
    (problem,) = told("recording", recording)
    assert "format 9.0 is newer" in problem

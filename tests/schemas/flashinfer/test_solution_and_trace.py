from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer import solution, trace
from kcap.schemas.flashinfer.definition import Workload
from kcap.schemas.flashinfer.trace import STATUSES, Correctness, Environment, Evaluation, Performance, Trace

SOLUTION: dict[str, Any] = {
    "name": "gemm_triton_v1",
    "definition": "gemm_n8_k4",
    "author": "someone",
    "spec": {
        "language": "triton",
        "target_hardware": ["cuda"],
        "entry_point": "src/main.py::run",
        "dependencies": [],
        "destination_passing_style": False,
        "binding": None,
    },
    "sources": [{"path": "src/main.py", "content": "def run(A, B): ..."}],
    "description": None,
}
WORKLOAD = Workload(uuid="u", axes={}, inputs={})
text = st.text(min_size=1)
names = st.from_regex(r"\A[a-z][a-z0-9_.-]{0,20}\Z")
solutions = st.builds(
    lambda paths, language, style, binding, content, more: {
        "name": more[0],
        "definition": more[1],
        "author": more[2],
        "spec": {
            "language": language,
            "target_hardware": ["cpu"],
            "entry_point": f"{paths[0]}::run",
            "destination_passing_style": style,
            "binding": binding,
        },
        "sources": [{"path": path, "content": content} for path in paths],
    },
    st.lists(names, min_size=1, unique=True),
    st.sampled_from(["python", "triton", "cpp", "cuda", "tilelang"]),
    st.booleans(),
    st.sampled_from([None, "torch", "tvm-ffi"]),
    text,
    st.tuples(names, names, names),
)
numbers = st.floats(min_value=0, allow_infinity=False)
errors = st.floats(min_value=0) | st.just(math.nan)
corrects = st.builds(
    Correctness,
    max_relative_error=errors,
    max_absolute_error=errors,
    extra=st.none() | st.dictionaries(text, st.booleans()),
)
performances = st.builds(Performance, latency_ms=numbers, reference_latency_ms=numbers, speedup_factor=numbers)


@st.composite
def evaluations(draw: st.DrawFn) -> Evaluation:
    status = draw(st.sampled_from(STATUSES))
    return Evaluation(
        status=status,
        environment=Environment(hardware=draw(text), libs=draw(st.dictionaries(text, text))),
        timestamp="2026-01-01T00:00:00",
        log=draw(st.text()),
        correctness=draw(corrects) if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        performance=draw(performances) if status == "PASSED" else None,
    )


def solved(**change: Any) -> bytes:
    return orjson.dumps(SOLUTION | change)


@given(solutions)
def test_a_solution_is_read_back(document: dict[str, Any]) -> None:
    one = solution.Solution.model_validate(document)
    assert solution.from_bytes(solution.to_bytes(one)) == one


def test_a_solution_keeps_its_keys() -> None:
    assert orjson.loads(solution.to_bytes(solution.from_bytes(solved()))) == SOLUTION


def test_the_destination_passing_style_is_always_written() -> None:
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "src/main.py::run"}
    written = orjson.loads(solution.to_bytes(solution.from_bytes(solved(spec=spec))))
    assert written["spec"] == {**spec, "destination_passing_style": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "a/b"}, "name: must be a file name"),
        ({"author": ".."}, "author: must be a file name"),
        ({"sources": []}, "sources: "),
        ({"sources": SOLUTION["sources"] * 2}, "sources: src/main.py is there twice"),
        ({"sources": [{"path": "/main.py", "content": "x"}]}, r"sources\.0\.path: must be relative"),
        ({"sources": [{"path": "a/../../main.py", "content": "x"}]}, r"sources\.0\.path: must be relative"),
        ({"sources": [{"path": "main.py", "content": ""}]}, r"sources\.0\.content"),
        ({"sources": [{"path": "other.py", "content": "x"}]}, "entry_point: src/main.py is not among sources"),
        ({"spec": {**SOLUTION["spec"], "entry_point": "run"}}, "must be file::function"),
        ({"spec": {**SOLUTION["spec"], "entry_point": "a::b::c"}}, "must be file::function"),
        ({"spec": {**SOLUTION["spec"], "language": "rust"}}, r"spec\.language"),
        ({"spec": {**SOLUTION["spec"], "target_hardware": []}}, r"spec\.target_hardware"),
        ({"spec": {**SOLUTION["spec"], "binding": "cffi"}}, r"spec\.binding"),
        ({"spec": {**SOLUTION["spec"], "destination_passing_style": 1}}, r"spec\.destination_passing_style"),
    ],
)
def test_a_solution_that_could_not_be_built_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        solution.from_bytes(solved(**change))


@given(st.binary())
def test_arbitrary_bytes_are_no_solution(content: bytes) -> None:
    with pytest.raises(FormatError):
        solution.from_bytes(content)


@given(evaluations())
def test_an_evaluation_is_read_back(evaluation: Evaluation) -> None:
    one = Trace(definition="d", solution="s", workload=WORKLOAD, evaluation=evaluation)
    again = Trace.model_validate(orjson.loads(one.line()))
    assert again.line() == one.line()  # by the line: NaN equals nothing
    assert not again.is_workload


def test_errors_that_are_not_finite_are_written_as_words() -> None:
    written = Correctness(max_relative_error=math.nan, max_absolute_error=math.inf).model_dump(mode="json")
    assert written == {"max_relative_error": "NaN", "max_absolute_error": "Infinity"}


def test_flashinfer_benchs_own_code_reads_what_is_written() -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    assert data.Solution.model_validate_json(solution.to_bytes(solution.from_bytes(solved()))).name == SOLUTION["name"]
    wrong = Evaluation(
        status="INCORRECT_NUMERICAL",
        environment=Environment(hardware="cpu"),
        timestamp="now",
        correctness=Correctness(max_relative_error=math.nan, max_absolute_error=math.inf),
    )
    line = Trace(definition="d", solution="s", workload=WORKLOAD, evaluation=wrong).line()
    read = data.Trace.model_validate_json(line)
    assert math.isnan(read.evaluation.correctness.max_relative_error)
    assert Trace.model_validate(orjson.loads(read.model_dump_json())).line()


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("measured", [(), ("correctness",), ("performance",), ("correctness", "performance")])
def test_the_status_tells_what_was_measured(status: str, measured: tuple[str, ...]) -> None:
    needed = {"PASSED": ("correctness", "performance"), "INCORRECT_NUMERICAL": ("correctness",)}.get(status, ())
    document = {"status": status, "environment": {"hardware": "cpu"}, "timestamp": "now"} | {
        key: {} for key in measured
    }
    if measured == needed:
        assert Evaluation.model_validate(document)
    else:
        with pytest.raises(ValueError, match=f"must (not )?be there with {status}"):
            Evaluation.model_validate(document)


@pytest.mark.parametrize("value", [-1.0, "nan", "inf", "1.0", True])
def test_an_error_is_a_number_that_is_not_negative(value: object) -> None:
    with pytest.raises(ValueError, match="max_relative_error"):
        Correctness.model_validate({"max_relative_error": value})


def test_a_line_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(Trace(definition="d", workload=WORKLOAD).line() + b'{"definition": "d"}\n')
    with pytest.raises(FormatError, match=r"t\.jsonl:2: workload: Field required"):
        list(trace.read(path))

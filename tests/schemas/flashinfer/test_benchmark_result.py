from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.flashinfer.benchmark_result import BenchmarkResult, CompilationFailure, Device, Success, read, write

HEAD = {"device": {"name": "NVIDIA A100-SXM4-80GB"}, "kernel_id": "gemm", "source": "flashinfer"}
SUCCESS = HEAD | {"compiled": True, "time": 0.25, "speedup": 2.0, "max_diff": 1e-6}
FAILURE = HEAD | {"compiled": False, "compile_error": "..."}


def dump(path: Path, document: Any) -> Path:
    path.write_bytes(orjson.dumps(document))
    return path


@pytest.mark.parametrize(("example", "form"), [(SUCCESS, Success), (FAILURE, CompilationFailure)])
def test_both_examples_of_the_schema_set_read_and_write_back(tmp_path: Path, example: Any, form: type) -> None:
    result = read(dump(tmp_path / "r.json", example))
    assert isinstance(result, form)
    write(tmp_path / "again.json", result)
    assert list(orjson.loads((tmp_path / "again.json").read_bytes()).items()) == list(example.items())


def test_what_was_not_measured_is_left_out_not_null(tmp_path: Path) -> None:
    write(tmp_path / "r.json", Success(device=Device(name="x"), kernel_id="k", source="s", time=1.0))
    assert set(orjson.loads((tmp_path / "r.json").read_bytes())) == {*HEAD, "compiled", "time"}


@pytest.mark.parametrize(
    "document",
    [
        HEAD,
        HEAD | {"compiled": True},
        HEAD | {"compiled": False},
        SUCCESS | {"time": -1},
        SUCCESS | {"compiled": "yes"},
        SUCCESS | {"device": "x"},
        SUCCESS | {"clock": 1},
        SUCCESS | {"device": {"name": "x", "memory": 80}},
        SUCCESS | {"compile_error": "..."},
        SUCCESS | {"time": "0.25"},
        SUCCESS | {"time": True},
        SUCCESS | {"compiled": 1},
        SUCCESS | {"kernel_id": 1},
        SUCCESS | {"speedup": "2"},
        FAILURE | {"time": 0.25},
        FAILURE | {"compiled": 0},
        [],
        None,
    ],
)
def test_neither_form_is_a_format_error(tmp_path: Path, document: Any) -> None:
    with pytest.raises(FormatError, match=r"r\.json: "):
        read(dump(tmp_path / "r.json", document))


@pytest.mark.parametrize("time", [float("inf"), float("nan"), -1.0])
def test_a_time_that_is_none_is_not_made(time: float) -> None:
    with pytest.raises(ValueError):
        Success(device=Device(name="x"), kernel_id="k", source="s", time=time)


numbers = st.floats(min_value=0, allow_infinity=False)
head = {"device": st.builds(Device, name=st.text()), "kernel_id": st.text(), "source": st.text()}
results = st.builds(
    Success, **head, time=numbers, speedup=st.none() | numbers, max_diff=st.none() | numbers
) | st.builds(CompilationFailure, **head, compile_error=st.text())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results") / "result.json"


@given(result=results)
def test_what_is_written_is_read_back(file: Path, result: BenchmarkResult) -> None:
    write(file, result)
    assert read(file) == result


@given(content=st.binary())
def test_arbitrary_bytes_are_no_result(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"result\.json"):
        read(file)


def test_a_whole_number_is_a_time(tmp_path: Path) -> None:
    assert read(dump(tmp_path / "r.json", SUCCESS | {"time": 1})).time == 1.0  # type: ignore[union-attr]

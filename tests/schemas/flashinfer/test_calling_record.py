from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.errors import FormatError
from kcap.schemas.derive.derive import calling_record_of
from kcap.schemas.flashinfer.calling_record import FRAMEWORKS, CallingRecord, KernelCount, read, write
from kcap.schemas.recording.recording import Call, Count, Launch, Metadata, load, write_recording

EXAMPLE = {
    "model": "meta-llama/Llama-3.1-8B",
    "framework": "SGLang",
    "kernels": [{"id": "silu_and_mul", "count": 4}, {"id": "rmsnorm", "count": 2}],
}


def test_the_schema_sets_own_example_reads_and_writes_back(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(orjson.dumps(EXAMPLE))
    write(tmp_path / "again.json", read(file))
    assert orjson.loads((tmp_path / "again.json").read_bytes()) == EXAMPLE


def test_kernels_are_written_by_falling_count_then_id(tmp_path: Path) -> None:
    kernels = [KernelCount(id=name, count=count) for name, count in (("b", 1), ("c", 9), ("a", 1))]
    write(tmp_path / "r.json", CallingRecord(model="m", framework="vLLM", kernels=kernels))
    assert [kernel.id for kernel in read(tmp_path / "r.json").kernels] == ["c", "a", "b"]


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"framework": "vllm"},
        {"kernels": [{"id": "x", "count": -1}]},
        {"kernels": [{"id": "x", "count": 1.5}]},
        {"kernels": [{"id": "x", "count": "1"}]},
        {"kernels": [{"id": "", "count": 1}]},
        {"kernels": [{"id": "x", "count": 1, "time": 2}]},
        {"model": 1},
        {"model": ""},
        {"kernels": [{"id": "x", "count": 1}, {"id": "y", "count": 1}, {"id": "x", "count": 2}]},
    ],
)
def test_what_the_schema_does_not_have_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(orjson.dumps(EXAMPLE | change))
    with pytest.raises(FormatError, match=r"r\.json: " + next(iter(change))):
        read(file)


@pytest.mark.parametrize("text", ['{"model": "a", "model": "b"}', '{"kernels": [{"id": "x", "count": 1, "count": 2}]}'])
def test_a_key_that_an_object_has_twice_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(FormatError, match=r"r\.json: (model|count): is there twice"):
        read(tmp_path / "r.json")


def test_broken_json_is_named_by_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{\n"model": }')
    with pytest.raises(FormatError, match=r"r\.json:2:\d+: "):
        read(tmp_path / "r.json")


def test_ids_are_definitions_and_counts_sums_over_phases_ranks_and_graphs_of_kernels_that_work(recording: Path) -> None:
    record = calling_record_of(load(recording))
    assert record is not None
    assert record.model_dump() == {
        "model": "meta-llama/Llama-3.1-8B",
        "framework": "vLLM",
        "kernels": [
            {"id": "rmsnorm_h4096", "count": 2804},
            {"id": "gemm_bf16_n6144_k4096", "count": 17},
            {"id": "_vllm_fa3_C::fwd", "count": 3},
        ],
    }


def test_plain_pytorch_has_no_calling_record(plain: Path) -> None:
    assert calling_record_of(load(plain)) is None


def test_a_framework_that_the_schema_does_not_name_has_none(tmp_path: Path) -> None:
    write_recording(tmp_path / "r", Metadata(model="m", framework="other"), [])
    assert calling_record_of(load(tmp_path / "r")) is None


def test_kernels_with_a_source_of_their_own_keep_their_ids(tmp_path: Path) -> None:
    launch = Launch(function="fused_add_rms_norm", grid=[16])
    kernel = Call(id=0, operator="triton::fused_add_rms_norm.s0a1b2c3d", launch=launch)
    counts = [Count(phase="decode", mode="graph", count=5568), Count(phase="prefill", count=32)]
    path = tmp_path / "r"
    write_recording(path, Metadata(model="m", framework="vLLM"), [kernel.model_copy(update={"counts": counts})])
    record = calling_record_of(load(path))
    assert record is not None
    assert record.model_dump()["kernels"] == [{"id": "triton::fused_add_rms_norm.s0a1b2c3d", "count": 5600}]


records = st.builds(
    CallingRecord,
    model=st.text(min_size=1),
    framework=st.sampled_from(FRAMEWORKS),
    kernels=st.lists(
        st.builds(KernelCount, id=st.text(min_size=1), count=st.integers(0, 2**63 - 1)),
        max_size=5,
        unique_by=lambda kernel: kernel.id,
    ),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "record.json"


@given(record=records)
def test_what_is_written_is_read_back_in_order(file: Path, record: CallingRecord) -> None:
    write(file, record)
    again = read(file)
    assert again.model_copy(update={"kernels": []}) == record.model_copy(update={"kernels": []})
    assert again.kernels == sorted(record.kernels, key=lambda kernel: (-kernel.count, kernel.id))


@given(content=st.binary())
def test_arbitrary_bytes_are_no_record(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"record\.json"):
        read(file)

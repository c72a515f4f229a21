"""A Recording on disk: whatever it holds is read back as it was written, and what is damaged is told by name."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save

import kcap
from kcap.errors import FormatError
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import (
    PHASES,
    Argument,
    Call,
    Count,
    Launch,
    Metadata,
    Program,
    Recording,
    Sample,
    SampledTensor,
    Step,
    Tap,
    load,
    write_recording,
)
from kcap.schemas.recording.records import MAX_NUMBER, MAX_RANK
from kcap.schemas.recording.values import (
    CONSTANT_KINDS,
    Drift,
    Folded,
    Group,
    Opaque,
    TensorSpec,
    TorchConstant,
    decode,
    encode,
)

sizes = st.integers(0, 2**11)  # the elements of five dimensions can be counted
jumps = st.integers(0, 2**40)
names = st.text(min_size=1, max_size=20)
numbers = st.integers(0, 2**62)


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    shape = draw(st.lists(sizes, max_size=5).map(tuple))
    strides = draw(st.none() | st.lists(jumps, min_size=len(shape), max_size=len(shape)).map(tuple))
    offset = draw(st.none() | jumps)
    device = draw(st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]))
    return TensorSpec(
        shape, draw(st.sampled_from(sorted(BY_NAME))), strides, offset, device, draw(numbers), draw(st.booleans())
    )


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=20)
    | tensor_specs()
    | st.builds(TorchConstant, st.sampled_from(CONSTANT_KINDS), st.text(max_size=20))
    | st.builds(Drift, st.text(max_size=20))
    | st.builds(Folded, st.text(max_size=20))
    | st.builds(Opaque, st.text(max_size=20))
    | st.integers(1, 2**40).flatmap(lambda size: st.builds(Group, st.just(size), st.integers(0, size - 1)))
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=10)
phases = st.sampled_from(PHASES)
counts = st.builds(
    Count,
    phase=phases,
    rank=st.integers(0, MAX_RANK),
    mode=st.sampled_from(["eager", "graph"]),
    count=st.integers(0, MAX_NUMBER),
)
arguments = st.builds(
    Argument,
    name=st.none() | names,
    value=values,
    keyword=st.booleans(),
    default=st.booleans(),
    written=st.booleans(),
)
launches = st.builds(
    Launch,
    language=st.sampled_from(["triton", "cpp", "tvm"]),
    kernel=st.none() | names,
    function=names,
    unread=st.none() | names,
    grid=st.lists(numbers, max_size=3),
    constexprs=st.dictionaries(names, values, max_size=3),
    num_warps=st.none() | numbers,
    num_stages=st.none() | numbers,
    options=st.dictionaries(names, values, max_size=2),
)
graph_uses = st.sampled_from(["eager", "piecewise", "full"])
calls = st.builds(
    Call,
    id=numbers,
    operator=names,
    kind=st.sampled_from(["kernel", "region"]),
    parent=st.none() | names,
    work=st.booleans(),
    args=st.lists(arguments, max_size=4),
    launch=st.none() | launches,
    counts=st.lists(counts, max_size=4),
)
programs = st.builds(
    Program,
    id=numbers,
    kind=st.sampled_from(["step", "graph"]),
    calls=st.lists(numbers, max_size=5),
    graphs=st.lists(st.tuples(numbers, numbers), max_size=3),
    size=st.none() | numbers,
    scope=st.none() | graph_uses,
    captured=numbers,
    counts=st.lists(counts, max_size=3),
)
steps = st.builds(
    Step,
    index=numbers,
    rank=numbers,
    phase=phases,
    tokens=numbers,
    sequences=numbers,
    lengths=st.lists(numbers, max_size=4),
    queries=st.lists(numbers, max_size=4),
    program=st.none() | numbers,
    mode=graph_uses,
    padded=st.none() | numbers,
)
samples = st.builds(
    Sample,
    call=numbers,
    phase=phases,
    rank=numbers,
    step=st.none() | numbers,
    scalars=st.dictionaries(names, values, max_size=3),
    offsets=st.dictionaries(names, numbers, max_size=3),
    tensors=st.dictionaries(
        names, st.builds(SampledTensor, file=st.none() | names, low=st.none() | numbers), max_size=3
    ),
)
statuses = st.sampled_from(["ok", "failed", "off", "absent"])
metadata = st.builds(
    Metadata,
    model=st.none() | names,
    framework=st.none() | names,
    engine_arguments=st.dictionaries(names, st.booleans() | numbers | names | st.none(), max_size=3),
    command=st.lists(names, max_size=3),
    complete=st.booleans(),
    seal=st.none() | names,
    coverage=st.none() | st.dictionaries(names, numbers | names, max_size=3),
    taps=st.lists(
        st.builds(Tap, name=names, rank=numbers, status=statuses, detail=names),
        max_size=3,
    ),
    steps=st.dictionaries(phases, numbers),
    totals=st.dictionaries(names, numbers, max_size=3),
    notes=st.lists(names, max_size=3),
)
TABLES = ("calls", "programs", "steps", "samples")


def read_everything(recording: Recording) -> dict[str, list[Any]]:
    return {table: getattr(recording, table) for table in TABLES}


@given(values)
def test_every_value_survives_json(value: Any) -> None:
    read = decode(orjson.loads(orjson.dumps(encode(value))))
    assert repr(read) == repr(value)  # repr: True is not 1, 1 is not 1.0, nan is nan


@given(calls)
def test_every_call_survives_its_line(call: Call) -> None:
    line = call.line()
    assert line.count(b"\n") == 1
    assert repr(Call.model_validate(orjson.loads(line))) == repr(call)


tables_of_rows = st.tuples(*(st.lists(rows, max_size=3) for rows in (calls, programs, steps, samples)))


def source_files(texts: list[bytes]) -> dict[str, bytes]:
    return {f"{hashlib.sha256(text).hexdigest()}.py": text for text in texts}


@given(metadata, tables_of_rows, st.lists(st.binary(max_size=8), max_size=3).map(source_files))
def test_recording_read_back_equals_what_was_written(
    head: Metadata, tables: tuple[list[Any], ...], sources: dict[str, bytes]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        write_recording(first, head, *tables, kernels=sources)
        assert {path.name: path.read_bytes() for path in (first / "kernels").iterdir()} == sources
        read = load(first)
        assert read.metadata == head
        assert repr(read_everything(read)) == repr(dict(zip(TABLES, tables, strict=True)))
        write_recording(second, read.metadata, *read_everything(read).values())
        for name in ("recording.json", *(f"{table}.jsonl" for table in TABLES)):
            assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "r.kcap"
    write_recording(path, Metadata(), [])
    return path


@given(name=st.sampled_from(["recording.json", *(f"{table}.jsonl" for table in TABLES)]), content=st.binary())
def test_arbitrary_bytes_are_a_format_error(damaged: Path, name: str, content: bytes) -> None:
    whole = (damaged / name).read_bytes()
    (damaged / name).write_bytes(content)
    try:
        read_everything(load(damaged))
    except FormatError as error:
        assert name in error.place or error.place == str(damaged)
    finally:
        (damaged / name).write_bytes(whole)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
tags = st.sampled_from(["tensor", "dtype", "float", "complex", "drift", "opaque", "nothing"])
fields = st.sampled_from(["shape", "dtype", "strides", "offset", "device", "storage"])
whole_tensor = {"shape": [2], "dtype": "int8"}
odd_values = (
    json
    | st.dictionaries(tags, json, max_size=2)
    | st.builds(lambda field, junk: {"tensor": {**whole_tensor, field: junk}}, fields, json)
)


@given(odd_values)
def test_odd_json_is_a_value_error_or_a_value(data: Any) -> None:
    try:
        value = decode(data)
    except ValueError:
        return
    assert repr(decode(encode(value))) == repr(value)


@given(st.sampled_from([Call, Program, Step, Sample, Metadata]), st.data())
def test_odd_fields_are_a_validation_error(model: type[Any], data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(model.model_fields)))
    junk = data.draw(json | st.just([{"value": {"tensor": {}}}]))
    with contextlib.suppress(ValueError):
        model.model_validate({"id": 0, "operator": "x", "call": 0, "index": 0, "phase": "decode", field: junk})


def test_deep_nesting_is_refused_before_the_stack_ends() -> None:
    with pytest.raises(ValueError, match="32 deep"):
        decode(orjson.loads(b"[" * 200 + b"]" * 200))


@pytest.mark.parametrize(
    "body",
    [
        {"shape": [1 << 62, 4]},
        {"shape": [0, 1 << 62, 4]},
        {"shape": [2], "strides": [1 << 62]},
        {"shape": [1], "offset": 1 << 62},
    ],
)
def test_a_tensor_that_torch_cannot_count_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more elements than any memory"):
        decode({"tensor": {"dtype": "int8", **body}})


@pytest.mark.parametrize("field", ["world_size", "layers_recorded", "layers_model"])
def test_metadata_has_numbers_that_fit_a_table(field: str) -> None:
    with pytest.raises(ValidationError, match="less than or equal"):
        Metadata(**{field: 1 << 31})


def test_newer_major_format_is_refused_by_name(tmp_path: Path) -> None:
    write_recording(tmp_path / "r", Metadata(format="2.0"), [])
    with pytest.raises(FormatError, match=r"recording\.json: format 2\.0 is newer .* upgrade kcap"):
        load(tmp_path / "r")


def test_json_that_names_no_format_is_no_recording(recording: Path) -> None:
    (recording / "recording.json").write_bytes(b"{}")
    with pytest.raises(FormatError, match=r"recording\.json: has no format"):
        load(recording)


def test_a_sample_of_which_the_smallest_value_is_above_the_largest_is_damage(recording: Path) -> None:
    with (recording / "samples.jsonl").open("ab") as file:
        file.write(b'{"call": 0, "phase": "decode", "tensors": {"0": {"low": 4, "high": 3}}}\n')
    with pytest.raises(FormatError, match=r"samples\.jsonl:\d+: .*low 4 is above high 3"):
        _ = load(recording).samples


@pytest.mark.parametrize("version", ["0.9", "1.7"])
def test_older_and_newer_minor_formats_are_read_and_unknown_keys_left(tmp_path: Path, version: str) -> None:
    write_recording(tmp_path / "r", Metadata(), [])
    (tmp_path / "r/recording.json").write_bytes(orjson.dumps({"format": version, "future": {"key": 1}}))
    (tmp_path / "r/calls.jsonl").write_bytes(b'{"id": 0, "operator": "aten::mm", "future": 1}\n')
    recording = kcap.load(tmp_path / "r")
    assert recording.calls == [Call(id=0, operator="aten::mm")]


def test_bad_line_is_named_by_file_and_number(recording: Path) -> None:
    with (recording / "calls.jsonl").open("ab") as file:
        file.write(b'{"id": -1, "operator": "aten::mm"}\n')
    with pytest.raises(FormatError, match=r"calls\.jsonl:6: id: "):
        _ = load(recording).calls


def test_directory_without_recording_json_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a Recording"):
        load(tmp_path)


def test_missing_table_says_damaged(recording: Path) -> None:
    (recording / "steps.jsonl").unlink()
    with pytest.raises(FormatError, match="damaged"):
        _ = load(recording).steps


def test_a_table_that_ends_too_soon_says_damaged(recording: Path) -> None:
    whole = load(recording)
    counted = whole.metadata.model_copy(update={"totals": {"calls": len(whole.calls)}})
    write_recording(recording, counted, whole.calls)
    assert len(load(recording).calls) == len(whole.calls)
    (recording / "calls.jsonl").write_bytes(b"".join(call.line() for call in whole.calls[:1]))
    with pytest.raises(FormatError, match=rf"calls.jsonl: has 1 of {len(whole.calls)} calls: the Recording is damaged"):
        _ = load(recording).calls


def test_recording_is_private_to_its_owner(recording: Path) -> None:
    assert stat.S_IMODE(recording.stat().st_mode) == 0o700


def test_kernels_leave_out_regions_and_views(recording: Path) -> None:
    loaded = load(recording)
    assert [call.id for call in loaded.kernels()] == [0, 1, 4]
    assert [call.id for call in loaded.kernels(hidden=True)] == [0, 1, 3, 4]


def test_damaged_value_file_is_a_format_error(recording: Path) -> None:
    (recording / "values/x").write_bytes(b"\xff" * 100)
    with pytest.raises(FormatError, match="safetensors"):
        load(recording).value(SampledTensor(file="x"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_values_are_read_packed_or_not(recording: Path, pack: Callable[[bytes], bytes]) -> None:
    held = np.array([[3, 0, 0], [0, 0, 7]], np.int32)
    (recording / "values/x").write_bytes(pack(save({"value": held})))
    tensor = SampledTensor(file="x")
    assert (load(recording).array(tensor) == held).all() and load(recording).array(tensor).dtype == held.dtype
    assert load(recording).value(tensor).tolist() == held.tolist()


def test_packed_values_that_are_torn_or_too_many_are_a_format_error(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(save({"value": np.zeros(100, np.int64)}))
    (recording / "values/torn").write_bytes(packed[:-12])
    (recording / "values/large").write_bytes(packed)
    monkeypatch.setattr("kcap.schemas.recording.recording.MOST_BYTES", 500)
    for name in ("torn", "large"):
        with pytest.raises(FormatError, match=f"values/{name}"):
            load(recording).array(SampledTensor(file=name))


def test_value_file_outside_the_recording_is_not_read(recording: Path) -> None:
    (recording.parent / "secret").write_bytes(b"x")
    with pytest.raises(FormatError, match="values/secret"):
        load(recording).value(SampledTensor(file="../../secret"))


def test_a_copy_with_other_counts_has_their_total():
    call = Call(id=0, operator="aten::mm", counts=[Count(phase="decode", count=3)])
    assert call.total == 3
    assert call.model_copy(update={"counts": [Count(phase="decode", count=5)]}).total == 5

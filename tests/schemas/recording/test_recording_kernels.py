"""What a Program ran with its graphs, and the sources of the kernels that a Recording keeps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcap.errors import FormatError
from kcap.schemas.recording.recording import (
    Call,
    Launch,
    Metadata,
    Program,
    Recording,
    SampledTensor,
    load,
    write_recording,
)


def in_order(recording: Recording, number: int) -> list[int]:
    return [call.id for call in recording.ran(recording.programs[number])]


@pytest.fixture
def graphed(tmp_path: Path) -> Recording:
    """Graphs of the Calls 3 and 4: replayed first, between, twice at one place, and last; and a step of one alone."""
    steps = [
        Program(id=0, calls=[0, 1, 2], graphs=[(0, 1), (1, 2), (1, 1), (3, 2)]),
        Program(id=1, kind="graph", calls=[3]),
        Program(id=2, kind="graph", calls=[4, 3]),
        Program(id=3, graphs=[(0, 2)]),
        Program(id=4, calls=[1, 1]),
    ]
    write_recording(tmp_path / "r", Metadata(), [Call(id=i, operator=f"x::{i}") for i in range(5)], steps)
    return load(tmp_path / "r")


@pytest.mark.parametrize(
    ("program", "expected"), [(0, [3, 0, 4, 3, 3, 1, 2, 4, 3]), (1, [3]), (3, [4, 3]), (4, [1, 1])]
)
def test_a_program_ran_its_graphs_where_they_were_replayed(
    graphed: Recording, program: int, expected: list[int]
) -> None:
    assert in_order(graphed, program) == expected


@pytest.mark.parametrize(
    ("damaged", "named"), [(Program(id=0, calls=[7]), "a Call 7"), (Program(id=0, graphs=[(0, 9)]), "a Program 9")]
)
def test_a_program_that_names_what_is_not_there_is_a_format_error(tmp_path: Path, damaged: Program, named: str) -> None:
    write_recording(tmp_path / "r", Metadata(), [Call(id=0, operator="x::0")], [damaged])
    with pytest.raises(FormatError, match=named):
        in_order(load(tmp_path / "r"), 0)


TEXT = "def kernel(): pass  # µs\n"
NAME = hashlib.sha256(TEXT.encode()).hexdigest() + ".py"


@pytest.fixture
def with_source(tmp_path: Path) -> Recording:
    write_recording(tmp_path / "r", Metadata(), [], kernels={NAME: TEXT.encode()})
    return load(tmp_path / "r")


def test_the_source_of_a_launch_is_the_text_that_its_name_hashes(with_source: Recording) -> None:
    assert with_source.source(Launch(kernel=NAME, function="kernel")) == TEXT


def test_a_source_that_was_changed_is_refused(with_source: Recording) -> None:
    (with_source.path / "kernels" / NAME).write_text(TEXT + "import os\n")
    with pytest.raises(FormatError, match="the Recording was changed"):
        with_source.source(Launch(kernel=NAME, function="kernel"))


@pytest.mark.parametrize("name", ["0" * 64 + ".py", "", ".", "..", "/", "a\0b"])
def test_a_source_that_is_missing_is_a_format_error(with_source: Recording, name: str) -> None:
    with pytest.raises(FormatError, match="not readable"):
        with_source.source(Launch(kernel=name, function="kernel"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_what_has_no_end_is_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    """As a Recording of somebody else's may hold."""
    write_recording(tmp_path / "r", Metadata(), [], kernels={NAME: b""}, values={"v.safetensors": b""})
    recording = load(tmp_path / "r")
    for file in (recording.path / "kernels" / NAME, recording.path / "values" / "v.safetensors"):
        file.unlink()
        make(file)
    with pytest.raises(FormatError, match=r"not readable .no regular file"):
        recording.source(Launch(kernel=NAME, function="kernel"))
    with pytest.raises(FormatError, match=r"not a readable safetensors file .*no regular file"):
        recording.array(SampledTensor(file="v.safetensors", dtype="int64", shape=(1,)))


def test_a_source_that_was_never_read_says_why(with_source: Recording) -> None:
    with pytest.raises(FormatError, match="source of kernel was not read: made in a shell"):
        with_source.source(Launch(function="kernel", unread="made in a shell"))


def test_a_source_outside_the_recording_is_not_read(with_source: Recording) -> None:
    (with_source.path.parent / NAME.replace(".py", ".txt")).write_text(TEXT)
    with pytest.raises(FormatError, match="kernels/"):
        with_source.source(Launch(kernel=f"../../{NAME.replace('.py', '.txt')}", function="kernel"))


def test_a_library_is_a_file_that_was_not_changed(tmp_path: Path) -> None:
    content = b"\x7fELF\xff"
    launch = Launch(language="tvm", kernel=hashlib.sha256(content).hexdigest() + ".so", function="add")
    write_recording(tmp_path / "r", Metadata(), [], kernels={str(launch.kernel): content})
    library = load(tmp_path / "r").library(launch)
    assert library.read_bytes() == content
    library.write_bytes(content + b"\0")
    with pytest.raises(FormatError, match="the Recording was changed"):
        load(tmp_path / "r").library(launch)


def test_a_source_that_is_no_text_is_a_format_error(tmp_path: Path) -> None:
    content = b"\xff\xfe"
    name = hashlib.sha256(content).hexdigest() + ".py"
    write_recording(tmp_path / "r", Metadata(), [], kernels={name: content})
    with pytest.raises(FormatError, match="no text"):
        load(tmp_path / "r").source(Launch(kernel=name, function="kernel"))

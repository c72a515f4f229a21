"""What a process leaves behind opens, whatever happened to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, here: the fallback pulls it in, and so would every forked victim
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import kcap
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.capture.shards.counts import BYTES, CLOSED, STEPS, all_closed, steps_so_far
from kcap.capture.shards.lines import TensorContent
from kcap.capture.shards.reader import read_shard, stems
from kcap.capture.window.window import StepShape, Window
from kcap.schemas.recording.recording import Recording

A = torch.eye(4)
RUNS = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(1, 9), st.booleans()), max_size=20)
STEP = ("aten::mm", "aten::add.Tensor", "aten::mul.Tensor")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of a process that recorded 30 steps of growing batches, and closed."""
    directory = tmp_path_factory.mktemp("whole")
    session = Session(str(directory), model="m", framework="vLLM")
    session.write()
    window = Window(session)
    window.start(rank=0, layers=2)
    table = torch.arange(6, dtype=torch.int32)
    with torch.no_grad():
        for step in range(30):
            window.begin(StepShape("decode", [1] * (1 + step % 3), [step] * (1 + step % 3)))
            torch.mm(A, A) + step
            torch.repeat_interleave(A, table[:4] % 2, dim=0)
            window.end()
    window.close()
    return directory


def copied(whole: Path, to: Path) -> tuple[Session, Path]:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(whole, to)
    (stem,) = stems(to)
    return Session(str(to), model="m", framework="vLLM"), stem


def opened(session: Session, to: Path) -> Recording:
    """The merged Recording, every part of it parsed."""
    recording = fold_session(session, to)
    again = kcap.load(to)
    assert (again.calls, again.programs, again.steps) == (recording.calls, recording.programs, recording.steps)
    for sample in again.samples:
        assert all(again.value(tensor) is not None for tensor in sample.tensors.values() if tensor.file)
    return again


def test_a_whole_shard_is_complete(whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    recording = opened(session, tmp_path / "out")
    assert recording.metadata.complete
    assert recording.metadata.steps == {"decode": 30}
    assert read_shard(stem).damaged == []
    assert (steps_so_far(tmp_path / "shards"), all_closed(tmp_path / "shards")) == ((1, 30), True)


def places(size: int, lines: list[bytes]) -> Iterator[int]:
    """Before, in, and after every line."""
    at = 0
    for line in lines:
        yield from (at, at + 1, at + len(line) // 2, at + len(line) - 1)
        at += len(line)
    assert at == size


def test_lines_cut_at_any_place_open(whole: Path, tmp_path: Path) -> None:
    (stem,) = stems(whole)
    lines = stem.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    size = sum(map(len, lines))
    for place in places(size, lines):
        session, cut = copied(whole, tmp_path / "shards")
        os.truncate(cut.with_suffix(".jsonl"), place)
        recording = opened(session, tmp_path / f"{place}")
        assert sum(recording.metadata.steps.values()) <= 30
        assert all(call.total <= 30 for call in recording.calls)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 512, 520, 4096, BYTES - 1])
def test_counts_cut_anywhere_open_and_are_partial(size: int, whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    os.truncate(stem.with_suffix(".counts"), size)
    recording = opened(session, tmp_path / "out")
    assert not recording.metadata.complete
    assert steps_so_far(tmp_path / "shards") == (0, 0)


def test_missing_counts_open_and_are_partial(whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    stem.with_suffix(".counts").unlink()
    metadata = opened(session, tmp_path / "out").metadata
    assert not metadata.complete
    (note,) = (note for note in metadata.notes if "counters" in note)
    assert note.startswith(f"rank 0 (process {read_shard(stem).pid}): nothing of it is counted: its counters cannot")
    assert not any("every step" in note for note in metadata.notes)


def test_of_a_shard_that_lost_its_first_line_nothing_is_counted(whole: Path, tmp_path: Path) -> None:
    """It says which rank its counts are of."""
    session, stem = copied(whole, tmp_path / "shards")
    file = stem.with_suffix(".jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b'"t":"process"' not in line))
    recording = opened(session, tmp_path / "out")
    assert not recording.metadata.complete and not recording.metadata.steps
    assert not any(call.total for call in recording.calls)
    assert any(f"{stem.name}: nothing of it is counted" in note for note in recording.metadata.notes)


def test_a_torn_last_line_is_left_out_and_said(whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    with stem.with_suffix(".jsonl").open("ab") as file:
        file.write(b'{"t":"call","id":99,"opera')
    recording = opened(session, tmp_path / "out")
    assert recording.metadata.steps == {"decode": 30}
    assert any("1 torn line" in note for note in recording.metadata.notes)


def test_damaged_lines_are_named_by_file_and_line(whole: Path, tmp_path: Path) -> None:
    # given a line that lacks a member, one of no known kind, and one that is torn
    _, stem = copied(whole, tmp_path / "shards")
    file = stem.with_suffix(".jsonl")
    count = file.read_bytes().count(b"\n")
    with file.open("ab") as shard:
        shard.write(b'{"t":"batch","id":9}\n{"t":"colour"}\n{"t":"call","id":99,"opera')
    # when the shard is read
    damaged = read_shard(stem).damaged
    # then each is named with what is wrong with it
    assert damaged[0] == f"{file.name}:{count + 1}: batch.program: Field required"
    assert [line.split(": ")[0] for line in damaged] == [f"{file.name}:{count + n}" for n in (1, 2, 3)]


SMALL = st.integers(-1, 40)
PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=3)
GRAPHS = {
    "t": st.sampled_from(["graph", "annotation"]), "id": SMALL, "number": SMALL, "graph": SMALL,
    "calls": st.lists(SMALL, max_size=4), "nodes": PAIRS, "total": SMALL | st.just(1 << 62),
    "size": st.none() | SMALL, "scope": st.sampled_from([None, "full", "piecewise", "half"]),
}  # fmt: skip
STEPS_OF_GRAPHS = {
    "t": st.sampled_from(["program", "batch", "profiled", "step"]), "id": SMALL, "calls": st.lists(SMALL, max_size=4),
    "program": SMALL, "phase": SMALL, "index": SMALL, "tokens": SMALL, "sequences": SMALL,
}  # fmt: skip
LINES = st.one_of(
    st.fixed_dictionaries(GRAPHS).map(lambda line: json.dumps(line).encode()),
    st.fixed_dictionaries(STEPS_OF_GRAPHS).map(lambda line: json.dumps(line).encode()),
    st.binary(max_size=200),
    st.dictionaries(
        st.sampled_from(["t", "id", "of", "operator", "args", "calls", "program", "phase", "call", "slot", "scalars"]),
        st.one_of(
            st.sampled_from(["call", "region", "program", "batch", "step", "sample", "drift", "process", "tap"]),
            st.integers(-2, 40),
            st.none(),
            st.lists(st.integers(-1, 9), max_size=3),
            st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        ),
    ).map(lambda line: json.dumps(line).encode()),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=12), at=st.integers(0, 40))
def test_arbitrary_lines_never_crash_the_merge(lines: list[bytes], at: int, whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    good = stem.with_suffix(".jsonl").read_bytes().splitlines()
    stem.with_suffix(".jsonl").write_bytes(b"\n".join([*good[:at], *lines, *good[at:]]))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    opened(session, tmp_path / "out")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=30))
def test_flipped_bytes_never_crash_the_merge(changes: list[tuple[float, int]], whole: Path, tmp_path: Path) -> None:
    session, stem = copied(whole, tmp_path / "shards")
    content = bytearray(stem.with_suffix(".jsonl").read_bytes())
    for place, byte in changes:
        content[int(place * (len(content) - 1))] = byte
    stem.with_suffix(".jsonl").write_bytes(content)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    opened(session, tmp_path / "out")


def test_a_session_that_left_nothing_is_an_empty_partial_recording(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    recording = opened(Session(str(tmp_path / "shards")), tmp_path / "out")
    assert recording.calls == []
    assert not recording.metadata.complete


def run_victim(session: Session, tell: int) -> None:
    """Records steps for ever; each step's number goes into the pipe right after it ended, so what is told has ended."""
    window = Window(session)
    window.start()
    a, long = A, torch.zeros(4096)
    for step in range(10**9):
        window.begin(StepShape("decode", [1], [step]))
        torch.mm(a, a)
        torch.exp(long[: 1 + step])  # a new call, and with it a Program that was not written before
        for _ in range(step % 5):
            a = a + step
        window.end()
        os.write(tell, b"%d\n" % (step + 1))


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_every_step_that_had_ended_survives_sigkill(recorder: str, tmp_path: Path) -> None:
    draw = random.Random(recorder)
    for attempt in range(20):
        session = Session(str(tmp_path / f"shards{attempt}"), recorder=recorder)
        session.write()
        told = killed(session, after=draw.randrange(1, 300), more=draw.random() * 0.01)
        recording = opened(session, tmp_path / f"out{attempt}")
        metadata = recording.metadata
        assert not metadata.complete
        assert any("without closing" in note for note in metadata.notes)
        ended = sum(metadata.steps.values())
        assert told <= ended <= told + 1  # killed between a step's end and its telling
        assert {call.total for call in recording.calls if call.operator == "aten::mm"} == ({ended} if ended else set())
        assert sum(call.total for call in recording.calls if call.operator == "aten::exp") == ended
        adds = sum(call.total for call in recording.calls if call.operator == "aten::add.Tensor")
        assert adds == sum(step % 5 for step in range(ended))
        listed = [step.index for step in recording.steps]  # of which the native recorder's last ones may have waited
        assert listed == list(range(ended if recorder == "python" else len(listed))) and len(listed) <= ended


def killed(session: Session, after: int, more: float) -> int:
    """The last step that the process told of; it was killed `more` seconds after it had told of step `after`."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                run_victim(session, tell)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(hear, "rb") as told:
        for _ in range(after):
            assert told.readline()
        time.sleep(more)
        os.kill(child, signal.SIGKILL)
        last = told.read().split()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return int(last[-1]) if last else after


def test_a_kill_while_a_step_runs_leaves_that_step_out(tmp_path: Path) -> None:
    session = Session(str(tmp_path / "shards"))
    session.write()
    child = os.fork()
    if child == 0:
        try:
            window = Window(session)
            window.start()
            for step in range(3):
                window.begin(StepShape("decode", [1], [step]))
                torch.mm(A, A)
                if step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                window.end()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    recording = opened(session, tmp_path / "out")
    assert [(call.operator, call.total) for call in recording.calls] == [("aten::mm", 2)]
    (stem,) = stems(tmp_path / "shards")
    shard = read_shard(stem)
    assert (shard.header(CLOSED), shard.header(STEPS)) == (0, 2)


@given(RUNS)
def test_values_in_runs_are_read_as_what_they_stand_for(runs: list[tuple[int, int, bool]]) -> None:
    written = [item for value, count, packed in runs for item in ([[value, count]] if packed else [value] * count)]
    meant = [value for value, count, _ in runs for _ in range(count)]
    content = TensorContent.model_validate({"dtype": "int32", "shape": [len(meant)], "values": written})
    assert content.values is not None and content.values.tolist() == meant and content.values.dtype == "int32"


@pytest.mark.parametrize("values", [[[1, -3]], [[1, 0]], [[1, 1 << 40]], [[1]], [[1, 2, 3]], [["a", 2]], [[1, 1.5]]])
def test_runs_that_cannot_be_are_no_values(values: list[object]) -> None:
    with pytest.raises(ValidationError):
        TensorContent.model_validate({"dtype": "int32", "shape": [2], "values": values})

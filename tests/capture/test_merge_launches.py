"""Shards with graphs, launches and profiled steps: what is damaged of them is left out and said, the rest counts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from shard_lines import MATRIX, Line, call, files, step_lines, write_shard

from kcap.capture.fold.recording import fold_session
from kcap.capture.session import PROFILE_ENDING, Session
from kcap.capture.shards.counts import KERNELS
from kcap.errors import FormatError
from kcap.schemas.recording import seal
from kcap.schemas.recording.recording import Recording

TEXTS = [b"def one(): pass\n", b"def two(): pass\n"]
NAMES = [hashlib.sha256(text).hexdigest() + ".py" for text in TEXTS]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    session = Session(str(tmp_path / "shards"), model="m", framework="vLLM")
    session.write()
    return session


def launched(number: int, kernel: str | None, **more: Any) -> Line:
    launch = {"kernel": kernel, "function": "k", "grid": [4], **more}
    return call(number, f"triton::k{number}", MATRIX, launch=launch)


def graph(number: int, calls: list[int], **more: Any) -> Line:
    return {"t": "graph", "id": number, "number": 0, "calls": calls, **more}


def keep_sources(session: Session, *numbers: int) -> None:
    directory = Path(session.directory) / KERNELS
    directory.mkdir(exist_ok=True)
    for number in numbers:
        (directory / NAMES[number]).write_bytes(TEXTS[number])


def totals(recording: Recording) -> dict[str, int]:
    return {item.operator: item.total for item in recording.calls}


GRAPHED = [call(0, "x::a", MATRIX), call(1, "x::b", MATRIX, graph=True), call(2, "x::c", MATRIX, graph=True)]


def test_a_replayed_graph_counts_its_calls_and_is_a_program_of_its_own(session: Session, tmp_path: Path) -> None:
    annotation = {"t": "annotation", "graph": 0, "size": 8, "scope": "full"}
    lines = [*GRAPHED, graph(3, [1, 2, 1]), annotation, *step_lines([0, 3, 0])]
    write_shard(session, 0, lines, [5], {3: 2})
    recording = fold_session(session, tmp_path / "out")
    assert totals(recording) == {"x::a": 10, "x::b": 14, "x::c": 7}
    replayed, step = recording.programs
    assert (step.kind, step.graphs, step.total) == ("step", [(1, replayed.id)], 5)
    assert (replayed.kind, replayed.size, replayed.scope, replayed.total) == ("graph", 8, "full", 7)
    assert [call.operator for call in recording.ran(step)] == ["x::a", "x::b", "x::c", "x::b", "x::a"]
    assert [(batch["mode"], batch["padded"]) for batch in recording.metadata.batches] == [("full", 8)]


def test_a_graph_of_unknown_calls_is_left_out_with_the_steps_that_replayed_it(session: Session, tmp_path: Path) -> None:
    bad = [graph(3, [1, 9]), *step_lines([0, 3], batch=1)]
    write_shard(session, 0, [*GRAPHED, *step_lines([0]), *bad], [5, 4], {3: 2})
    recording = fold_session(session, tmp_path / "out")
    assert totals(recording) == {"x::a": 5}
    assert [program.kind for program in recording.programs] == ["step"]


def test_a_graph_inside_a_graph_or_itself_ends(session: Session, tmp_path: Path) -> None:
    graphs = [graph(3, [1, 3]), graph(4, [1]), graph(5, [4, 2])]
    write_shard(session, 0, [*GRAPHED, *graphs, *step_lines([0, 4])], [5])
    assert totals(fold_session(session, tmp_path / "out")) == {"x::a": 5, "x::b": 5}


KERNEL_NAME = {"t": "kernel_name", "name": "triton_1", "function": "k"}
PROFILED = {"t": "profiled", "index": 0, "program": 0, "phase": 1, "tokens": 1, "sequences": 1}
DAMAGED = {
    "nodes reversed": graph(3, [1], nodes=[[2, 1]], total=2),
    "nodes past the last": graph(3, [1], nodes=[[0, 3]], total=2),
    "negative nodes": graph(3, [1], nodes=[[-1, 1]], total=2),
    "nodes of one end": graph(3, [1], nodes=[[1]], total=2),
    "negative total": graph(3, [1], total=-1),
    "total beyond any count": graph(3, [1], total=1 << 63),
    "size in words": graph(3, [1], size="many"),
    "unknown scope": graph(3, [1], scope="half"),
    "negative call": graph(3, [-1]),
    "no number": {"t": "graph", "id": 3, "calls": [1]},
    "annotation of no graph": {"t": "annotation", "size": 8},
    "annotation's scope": {"t": "annotation", "graph": 0, "scope": "half"},
    "profiled phase": {**PROFILED, "phase": 4},
    "profiled clock": {**PROFILED, "sm_mhz": -5},
    "profiled without size": {"t": "profiled", "index": 0, "program": 0, "phase": 1},
    "kernel's name": {**KERNEL_NAME, "name": 1},
    "kernel's function": {**KERNEL_NAME, "function": None},
    "tap's status": {"t": "tap", "name": "x", "status": "fine", "detail": ""},
    "launch without a function": call(7, "triton::k", MATRIX, launch={"kernel": NAMES[0]}),
    "launch in another language": launched(7, NAMES[0], language="basic"),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_left_out_and_said(line: Line, session: Session, tmp_path: Path) -> None:
    write_shard(session, 0, [*GRAPHED, line, *step_lines([0])], [5])
    recording = fold_session(session, tmp_path / "out")
    assert any("1 torn lines" in note for note in recording.metadata.notes)
    assert totals(recording) == {"x::a": 5}
    assert recording.metadata.coverage is None


def test_nodes_of_an_unknown_total_cost_the_graph_nothing(session: Session, tmp_path: Path) -> None:
    """Counts do not depend on them: they are there for the coverage alone."""
    write_shard(session, 0, [*GRAPHED, graph(3, [1], nodes=[[0, 4]], total=0), *step_lines([3])], [5])
    assert totals(fold_session(session, tmp_path / "out")) == {"x::b": 5}


def trace(*kernels: str) -> bytes:
    """A step that launched one graph of these kernels."""
    base = {"ph": "X", "pid": 1, "tid": 1}
    span = {**base, "cat": "user_annotation", "name": "kcap:step:0", "ts": 0, "dur": 90}
    start = {**base, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 5, "dur": 1, "args": {"correlation": 7}}
    ran = [
        {**base, "cat": "kernel", "name": name, "ts": 10 + i, "dur": 1, "args": {"correlation": 7, "stream": 7}}
        for i, name in enumerate(kernels)
    ]
    return orjson.dumps({"traceEvents": [span, start, *ran]})


def test_a_graph_of_endless_nodes_takes_no_memory(session: Session, tmp_path: Path) -> None:
    huge = 1 << 62
    lines = [*GRAPHED, graph(3, [1], nodes=[[0, huge]], total=huge), *step_lines([3]), PROFILED]
    stem = write_shard(session, 0, lines, [5])
    stem.with_name(stem.name + PROFILE_ENDING).write_bytes(trace("one", "two"))
    recording = fold_session(session, tmp_path / "out")
    assert totals(recording) == {"x::b": 5}
    assert recording.metadata.coverage is not None
    assert recording.metadata.coverage["kernels"] == 2


@pytest.mark.parametrize(("operator", "missing"), [("tvm::run", False), ("tvm::run.01234567", True)])
def test_a_function_of_a_module_may_launch_kernels_of_any_name(
    operator: str, missing: bool, session: Session, tmp_path: Path
) -> None:
    """A kernel of a Relax VM's library is called like its function."""
    line = call(0, operator, MATRIX, launch={"language": "tvm", "kernel": None, "function": "run"})
    stem = write_shard(session, 0, [line, *step_lines([0]), PROFILED], [5])
    stem.with_name(stem.name + PROFILE_ENDING).write_bytes(trace("other"))
    fold_session(session, tmp_path / "out")
    (step,) = map(orjson.loads, (tmp_path / "out" / "coverage.jsonl").read_bytes().splitlines())
    assert ("run" in [each["operator"] for each in step["disagreements"]]) == missing


def test_calls_that_only_profiled_steps_ran_keep_their_scalars_and_offsets(session: Session, tmp_path: Path) -> None:
    """Such steps are not sampled: without what folds out of a call, it could not be replayed."""
    drift = {"t": "drift", "operator": "x::d", "scalars": 2, "offsets": 1}
    far = {"tensor": {**MATRIX["tensor"], "offset": 64}}
    lines = [*GRAPHED, call(4, "x::d", far, 7), graph(5, [4]), drift, *step_lines([0])]
    lines += [{"t": "program", "id": 1, "calls": [5]}, {**PROFILED, "program": 1}]
    write_shard(session, 0, lines, [5])
    recording = fold_session(session, tmp_path / "out")
    (sample,) = [sample for sample in recording.samples if recording.calls[sample.call].operator == "x::d"]
    assert (sample.phase, sample.step, sample.scalars, sample.offsets) == ("decode", None, {"1": 7}, {"0": 64})
    assert totals(recording) == {"x::a": 5, "x::d": 0}, "it does not count"


def test_a_profiled_step_without_its_trace_is_a_note(session: Session, tmp_path: Path) -> None:
    write_shard(session, 0, [*GRAPHED, *step_lines([0]), PROFILED], [5])
    recording = fold_session(session, tmp_path / "out")
    assert recording.metadata.coverage is None
    assert any(note.startswith("coverage of process 100: ") for note in recording.metadata.notes)


def test_a_source_that_is_missing_from_a_shard_is_told_by_the_reader(session: Session, tmp_path: Path) -> None:
    keep_sources(session, 1)
    write_shard(session, 0, [launched(0, NAMES[0]), launched(1, NAMES[1]), *step_lines([0, 1])], [5])
    recording = fold_session(session, tmp_path / "out")
    assert totals(recording) == {"triton::k0": 5, "triton::k1": 5}
    missing, kept = (call.launch for call in recording.calls)
    assert missing is not None
    assert kept is not None
    with pytest.raises(FormatError, match=rf"kernels/{NAMES[0]}: not readable"):
        recording.source(missing)
    assert recording.source(kept).encode() == TEXTS[1]
    assert seal.holds(recording.metadata.seal, [NAMES[1]]), "what is there is sealed"


def test_a_torn_source_is_left_out_and_not_sealed(session: Session, tmp_path: Path) -> None:
    keep_sources(session, 0, 1)
    (Path(session.directory) / KERNELS / NAMES[0]).write_bytes(TEXTS[0][:5])
    write_shard(session, 0, [launched(0, NAMES[0]), launched(1, NAMES[1]), *step_lines([0, 1])], [5])
    recording = fold_session(session, tmp_path / "out")
    assert [path.name for path in (recording.path / "kernels").iterdir()] == [NAMES[1]]
    assert seal.holds(recording.metadata.seal, [NAMES[1]])


def test_a_recording_without_sources_has_no_seal(session: Session, tmp_path: Path) -> None:
    write_shard(session, 0, [launched(0, None, unread="a lambda"), *step_lines([0])], [5])
    assert fold_session(session, tmp_path / "out").metadata.seal is None
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["../{}", "a/{}", "/{}", "{}/", "..", "."])
def test_a_source_named_by_a_path_is_written_nowhere(name: str, session: Session, tmp_path: Path) -> None:
    keep_sources(session, 0)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    stem = write_shard(session, 0, [launched(0, name.format(NAMES[0])), *step_lines([0])], [5])
    recording = fold_session(session, tmp_path / "out")
    assert list((recording.path / "kernels").iterdir()) == []
    ours = {path for path in tmp_path.rglob("*") if path.is_file() and recording.path not in path.parents}
    assert ours - before == {stem.with_suffix(".jsonl"), stem.with_suffix(".counts")}


def test_merging_launches_and_graphs_twice_gives_the_same_bytes(session: Session, tmp_path: Path) -> None:
    keep_sources(session, 0, 1)
    for rank in (1, 0):
        order = [rank, 1 - rank]
        calls = [launched(0, NAMES[order[0]]), launched(1, NAMES[order[1]]), launched(2, NAMES[0], num_warps=8)]
        steps = [*step_lines([3, 0, 3]), *step_lines([1], phase=0, batch=1)]
        profiled = [PROFILED, KERNEL_NAME, {"t": "annotation", "graph": 0, "size": 4}]
        stem = write_shard(session, rank, [*calls, graph(3, [2, 1]), *steps, *profiled], [2, 3], {3: 1})
        stem.with_name(stem.name + PROFILE_ENDING).write_bytes(trace("k", "triton_1"))
    first, second = fold_session(session, tmp_path / "first"), fold_session(session, tmp_path / "second")
    assert files(first) == files(second)
    assert {"coverage.jsonl", *(f"kernels/{name}" for name in NAMES)} <= set(files(first))

"""Shards of several processes fold into one Recording, and always into the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_lines import MATRIX, call, files, step_lines, write_shard

from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.schemas.derive import derive
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.values import Drift, TensorSpec


def matrix(**more: Any) -> dict[str, Any]:
    return {"tensor": {**MATRIX["tensor"], **more}}


EAGER = {"mode": "eager", "padded": 0}  # a step without graphs
Write = Callable[..., None]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    session = Session(str(tmp_path / "shards"), model="m", framework="vLLM")
    session.write()
    return session


@pytest.fixture
def shard(session: Session) -> Write:
    """Write one process's shard."""
    return functools.partial(write_shard, session)


def merged(session: Session, tmp_path: Path, name: str = "out") -> Recording:
    return fold_session(session, tmp_path / name)


def totals(recording: Recording) -> dict[str, int]:
    return {item.operator: item.total for item in recording.calls}


def test_the_ranks_of_one_model_share_calls_and_programs(session: Session, shard: Write, tmp_path: Path) -> None:
    # given two ranks that ran the same step, and numbered its calls differently
    shard(0, [call(0, "x::a", MATRIX), call(1, "x::b", MATRIX), *step_lines([0, 1, 0])], [5])
    shard(1, [call(0, "x::b", MATRIX), call(1, "x::a", MATRIX), *step_lines([1, 0, 1])], [5])
    # when they are merged
    recording = merged(session, tmp_path)
    # then each Call counts once for each rank, and the Program is one
    assert totals(recording) == {"x::a": 20, "x::b": 10}
    assert [(count.rank, count.count) for count in recording.calls[0].counts] == [(0, 10), (1, 10)]
    (program,) = recording.programs
    assert [recording.calls[number].operator for number in program.calls] == ["x::a", "x::b", "x::a"]
    assert [(count.rank, count.count) for count in program.counts] == [(0, 5), (1, 5)]


def test_the_steps_of_ranks_are_the_same_steps(session: Session, shard: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        shard(rank, [call(0, "x::a", MATRIX), *step_lines([0])], [7])
    metadata = merged(session, tmp_path).metadata
    assert metadata.steps == {"decode": 7}
    assert metadata.batches == [{"phase": "decode", "tokens": 4, "sequences": 4, **EAGER, "steps": 7}]
    assert metadata.world_size == 2
    assert [tap.rank for tap in metadata.taps] == [0, 1]


def test_the_calling_record_sums_over_ranks(session: Session, shard: Write, tmp_path: Path) -> None:
    for rank in (0, 1):
        shard(rank, [call(0, "x::a", MATRIX), *step_lines([0])], [7])
    recording = merged(session, tmp_path)
    record = derive.calling_record_of(recording)
    assert record is not None
    assert [(kernel.id, kernel.count) for kernel in record.kernels] == [("x::a", 14)]


def test_a_rank_that_was_killed_makes_the_whole_partial(session: Session, shard: Write, tmp_path: Path) -> None:
    shard(0, [call(0, "x::a", MATRIX), *step_lines([0])], [7])
    shard(1, [call(0, "x::a", MATRIX), *step_lines([0])], [4], closed=0)
    recording = merged(session, tmp_path)
    assert not recording.metadata.complete
    assert [(count.rank, count.count) for count in recording.calls[0].counts] == [(0, 7), (1, 4)]
    assert any("rank 1 (process 101) ended without closing" in note for note in recording.metadata.notes)
    assert [(rank.rank, rank.ended, rank.steps) for rank in recording.metadata.ranks] == [
        (0, True, {"decode": 7}),
        (1, False, {"decode": 4}),
    ]


def test_counts_of_steps_and_of_single_calls_add_up(session: Session, shard: Write, tmp_path: Path) -> None:
    shard(0, [call(0, "x::a", MATRIX), *step_lines([0, 0])], [7], {0: 5}, loose_steps=2, overflow=3)
    metadata = merged(session, tmp_path).metadata
    assert metadata.totals["kernels"] == 19
    assert metadata.steps == {"decode": 9}
    assert metadata.dropped == {"overflow": 3}


def test_what_drifts_in_one_rank_folds_in_all(session: Session, shard: Write, tmp_path: Path) -> None:
    drift = {"t": "drift", "operator": "x::a", "scalars": 2, "offsets": 1}
    many = [call(i, "x::a", matrix(offset=16 * i), 100 + i) for i in range(3)]
    shard(0, [*many, call(3, "x::a", matrix(offset=None), {"drift": "int"}), drift, *step_lines([0, 1, 2, 3])], [2])
    shard(1, [call(0, "x::a", matrix(offset=64), 7), *step_lines([0])], [2])
    recording = merged(session, tmp_path)
    (folded,) = recording.calls
    assert folded.total == 10
    spec, scalar = (argument.value for argument in folded.args)
    assert isinstance(spec, TensorSpec)
    assert spec.offset is None
    assert isinstance(scalar, Drift)
    assert {(s.rank, s.scalars.get("1"), s.offsets.get("0")) for s in recording.samples} >= {(1, 7, 64)}
    assert {s.scalars["1"] for s in recording.samples if s.rank == 0} <= {100, 101, 102}


def test_samples_stand_for_the_invocations_that_they_were_drawn_from(
    session: Session, shard: Write, tmp_path: Path
) -> None:
    # given a scalar that was seen with two values before it was known to drift, and 998 times after
    early = [call(0, "x::a", MATRIX, 1), call(1, "x::a", MATRIX, 2), call(2, "x::a", MATRIX, {"drift": "int"})]
    drift = {"t": "drift", "operator": "x::a", "scalars": 2, "offsets": 0}
    drawn = [
        {"t": "sample", "call": 2, "phase": 1, "slot": i, "step": 250 * i + 3, "scalars": {"1": 250 * i + 4}}
        for i in range(4)
    ]
    programs = [line for number in range(3) for line in step_lines([number], batch=number)]
    shard(0, [*early, drift, *drawn, *programs], [1, 1, 998])
    # then the two first steps are no half of the Samples
    assert [s.scalars["1"] for s in merged(session, tmp_path).samples] == [4, 254, 504, 754]


def test_an_invocation_before_a_scalar_drifted_is_no_sample_beside_those_that_hold_tensors(
    session: Session, shard: Write, tmp_path: Path
) -> None:
    early = [call(0, "x::a", MATRIX, 1), call(1, "x::a", MATRIX, {"drift": "int"})]
    drift = {"t": "drift", "operator": "x::a", "scalars": 2, "offsets": 0}
    tensors = {"0": {"dtype": "int32", "shape": [2], "values": [3, 4], "low": 3, "high": 4}}
    drawn = {"t": "sample", "call": 1, "phase": 1, "slot": 0, "step": 1, "scalars": {"1": 7}, "tensors": tensors}
    shard(0, [*early, drift, drawn, *step_lines([0]), *step_lines([1], batch=1)], [1, 1])
    (sample,) = merged(session, tmp_path).samples
    assert sample.scalars == {"1": 7} and sample.tensors


def test_a_region_is_its_own_call(session: Session, shard: Write, tmp_path: Path) -> None:
    lines = [call(0, "x::outer", MATRIX), {"t": "region", "id": 1, "of": 0}, call(2, "x::inner", parent="x::outer")]
    shard(0, [*lines, *step_lines([1, 2, 0])], [3])
    recording = merged(session, tmp_path)
    assert [(c.operator, c.kind, c.total) for c in recording.calls] == [
        ("x::outer", "region", 3),
        ("x::inner", "kernel", 3),
        ("x::outer", "kernel", 3),
    ]
    assert recording.metadata.totals == {"calls": 3, "kernels": 6, "regions": 3, "views": 0}


def test_a_program_with_a_call_that_is_missing_is_left_out(session: Session, shard: Write, tmp_path: Path) -> None:
    shard(0, [call(0, "x::a", MATRIX), *step_lines([0]), *step_lines([0, 9], batch=1)], [2, 3])
    recording = merged(session, tmp_path)
    assert totals(recording) == {"x::a": 2}
    assert len(recording.programs) == 1


def test_a_torn_line_makes_the_recording_partial_though_its_shard_was_closed(
    session: Session, shard: Write, tmp_path: Path
) -> None:
    stem = shard(0, [call(0, "x::a", MATRIX), call(1, "x::b", MATRIX), *step_lines([0, 1])], [3])
    assert merged(session, tmp_path, "whole").metadata.complete
    lines = stem.with_suffix(".jsonl")
    lines.write_bytes(lines.read_bytes().replace(b"x::b", b"x::b\xff"))
    metadata = merged(session, tmp_path, "torn").metadata
    assert (metadata.steps, metadata.complete) == ({}, False)
    assert "rank 0 (process 100): 1 torn lines left out" in metadata.notes


def test_a_step_that_had_not_ended_has_no_line(session: Session, shard: Write, tmp_path: Path) -> None:
    steps = [
        {"t": "step", "index": i, "program": 0, "phase": 1, "tokens": 4, "sequences": 4, "lengths": [i]}
        for i in range(5)
    ]
    shard(0, [call(0, "x::a", MATRIX), *step_lines([0]), *steps], [3], closed=0)
    assert [step.index for step in merged(session, tmp_path).steps] == [0, 1, 2]


def test_merging_twice_gives_the_same_bytes(session: Session, shard: Write, tmp_path: Path) -> None:
    tensors = {"0": {"dtype": "int32", "shape": [2], "values": [3, 4], "low": 3, "high": 4}}
    samples = [{"t": "sample", "call": i, "phase": 1, "slot": 0, "step": 0, "tensors": tensors} for i in range(3)]
    for rank in (1, 0):
        lines = [call(i, f"x::k{(i + rank) % 3}", MATRIX) for i in range(3)]
        shard(rank, [*lines, *samples, *step_lines([0, 1, 2])], [2], {1: 4})
    first, second = merged(session, tmp_path, "first"), merged(session, tmp_path, "second")

    assert files(first) == files(second)
    assert len(list((first.path / "values").iterdir())) == 1, "equal values are kept once"


def test_secrets_of_the_session_are_not_in_the_recording(shard: Write, session: Session, tmp_path: Path) -> None:
    shard(0, [call(0, "x::a", MATRIX), *step_lines([0])], [1])
    secret = Session(session.directory, command=["vllm", "--api-key", "hush"], engine_arguments={"hf_token": "hush"})
    recording = fold_session(secret, tmp_path / "out")
    assert b"hush" not in b"".join(path.read_bytes() for path in recording.path.rglob("*") if path.is_file())

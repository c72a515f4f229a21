"""Which Programs are replayed, and on which Samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import Values, call, tensor
from programs import CALLS, program

from kcap.errors import CallError
from kcap.replay.program.choose import ProgramKind, graph_use, most_frequent_programs, nearest_line, program_of_step
from kcap.replay.program.job import program_job
from kcap.schemas.recording.recording import Recording, Sample, Step, load

Write = Callable[..., Path]
GRAPH = {"kind": "graph"}


def loaded(write: Write, *programs: object, **more: object) -> Recording:
    return load(write(CALLS, programs=programs, **more))


def test_the_most_frequent_program_of_each_phase_use_and_size_is_chosen(recorded: Write) -> None:
    found = most_frequent_programs(
        loaded(
            recorded,
            program(0, [0], {"prefill": 2}),
            program(1, [0, 1], {"decode": 5, "prefill": 3}),
            program(2, [1], {"decode": 9}),
            program(3, [0], {"decode": 9}, graphs=[(1, 5)]),
            program(4, [0], {"decode": 7}, graphs=[(1, 6)]),
            program(5, [1], {"decode": 99}, size=8, scope="full", **GRAPH),  # 99 times in that step and others
            program(6, [1], size=16, scope="full", **GRAPH),
        )
    )
    assert [(one.program.id, one.kind, one.count) for one in found] == [
        (2, ProgramKind("decode", "eager", None), 9),
        (3, ProgramKind("decode", "full", 8), 9),
        (4, ProgramKind("decode", "full", 16), 7),
        (1, ProgramKind("prefill", "eager", None), 3),
    ]


def test_a_graph_that_no_step_replayed_is_a_program_of_its_own(recorded: Write) -> None:
    recording = loaded(recorded, program(0, [0], {"other": 4}, size=8, **GRAPH), program(1, [0], {"other": 3}))
    assert [(one.program.id, one.kind.mode, one.kind.padded) for one in most_frequent_programs(recording)] == [
        (0, "full", 8),
        (1, "eager", None),
    ]


def test_several_graphs_with_calls_between_them_are_piecewise(recorded: Write) -> None:
    part = {"scope": "piecewise", **GRAPH}
    whole = program(0, [1], {"decode": 1}, graphs=[(0, 1), (1, 2)])
    recording = loaded(recorded, whole, program(1, [0], size=8, **part), program(2, [0, 0], size=16, **part))
    assert graph_use(recording, whole) == ("piecewise", 16)


def test_nested_graphs_run_in_their_place_and_views_and_regions_never(recorded: Write) -> None:
    recording = loaded(
        recorded,
        program(0, [1, 2, 4, 1], {"decode": 1}, graphs=[(0, 1), (2, 1), (4, 2)]),
        program(1, [0, 0], **GRAPH),
        program(2, [3], **GRAPH),
    )
    job = program_job(recording, most_frequent_programs(recording)[0])
    assert job.order == [0, 0, 1, 0, 0, 1, 3]
    assert job.counts == {0: 4, 1: 2, 3: 1}


@pytest.mark.parametrize(
    ("programs", "phase", "words"),
    [([], None, "holds no Programs"), ([program(0, [0], {"decode": 1})], "prefill", "only of decode")],
)
def test_no_program_is_an_error_that_says_what_there_is(recorded: Write, programs, phase, words: str) -> None:
    with pytest.raises(CallError, match=words):
        most_frequent_programs(loaded(recorded, *programs), phase)


def step(index: int, **more: object) -> Step:
    return Step.model_validate({"index": index, "phase": "decode", **more})


def test_a_step_names_its_program_and_kind(recorded: Write) -> None:
    programs = [program(0, [0], {"decode": 3}), program(1, [0, 1], {"decode": 1})]
    steps = [step(7, program=1, mode="full", padded=8, rank=1), step(7, program=0, rank=0), step(9)]
    recording = load(recorded(CALLS, programs=programs, steps=steps))
    chosen = program_of_step(recording, 7)
    assert (chosen.program.id, chosen.kind, chosen.count) == (0, ProgramKind("decode", "eager", None), 3)
    with pytest.raises(CallError, match=r"--step 8: .*\(2, from 7 to 9\)"):
        program_of_step(recording, 8)
    with pytest.raises(CallError, match=r"--step 9: .*does not have its Program"):
        program_of_step(recording, 9)


LOOKUP = call("aten::embedding", tensor(9, 2), tensor(2, dtype="int64", storage=1), id=5)
OTHER = call("aten::index_select", tensor(9, 2), 0, tensor(2, dtype="int64", storage=1), id=6)


def test_samples_are_of_one_step_of_the_program_where_they_can_be(recorded: Write, values: Values) -> None:
    """Step 3 has most Samples, but another Program ran in it; of the Program's own, step 8 has two, step 2 has one."""

    def sample(number: int, phase: str, at: int | None) -> Sample:
        return Sample.model_validate({"call": number, "phase": phase, "step": at})

    samples = [
        *(sample(number, "decode", 3) for number in (5, 6)),
        sample(5, "decode", 2),
        sample(5, "prefill", 8),
        sample(5, "decode", 8),
        sample(6, "decode", 8),
    ]
    programs = [program(0, [5, 0, 6], {"decode": 3}), program(1, [5, 6], {"decode": 1})]
    steps = [step(2, program=0), step(3, program=1), step(8, program=0)]
    calls = [*CALLS, LOOKUP, OTHER]
    recording = load(recorded(calls, samples, programs, steps))
    assert program_job(recording, most_frequent_programs(recording)[0]).samples == {5: 4, 6: 5}
    assert program_job(recording, program_of_step(recording, 2)).samples == {
        5: 2,
        6: 1,
    }  # OTHER was not sampled in it: the nearest


def test_the_phase_comes_before_the_step_and_no_sample_is_none() -> None:
    def sample(phase: str, at: int | None) -> Sample:
        return Sample.model_validate({"call": 0, "phase": phase, "step": at})

    given = list(enumerate([sample("prefill", 5), sample("decode", None), sample("decode", 90)]))
    assert nearest_line(given, "decode", (0, 5)) == 2
    assert nearest_line(given, "mixed", (0, 6)) == 0
    assert nearest_line([], "decode", (0, 5)) is None


def test_a_step_of_another_replica_is_another_batch() -> None:
    given = [Sample.model_validate({"call": 0, "phase": "decode", "rank": rank, "step": 10 + rank}) for rank in (0, 1)]
    assert [nearest_line(enumerate(given), "decode", (rank, 11)) for rank in (0, 1)] == [0, 1]

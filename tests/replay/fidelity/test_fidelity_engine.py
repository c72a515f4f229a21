"""The engine's side of the fidelity: kinds of profiled steps, their counts, their spans, the nearest Samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import in_a_row, kernel, step, steps_of

from kcap.capture.fold.coverage import ProfiledStep, attribute, covered, read_trace
from kcap.errors import CallError, FormatError
from kcap.replay.fidelity.engine import (
    FEWEST_GAPS,
    GAP_US,
    LAUNCH_US,
    KindSteps,
    Span,
    StepKind,
    median_gap,
    profiled_kinds,
    span_of_step,
)
from kcap.replay.fidelity.replaying import NearestSample, nearest_sample, steps_by_rank
from kcap.schemas.recording.recording import Call, Metadata, Program, Recording, Sample, Step, load, write_recording
from kcap.schemas.recording.records import Argument, Rank
from kcap.schemas.recording.values import Group
from kcap.schemas.results import coverage
from kcap.schemas.results.coverage import KernelTime, StepCoverage

MM, VIEW, REGION = Call(id=0, operator="a::mm"), Call(id=1, operator="a::view", work=False), Call(id=2, operator="a::r")
REGION = REGION.model_copy(update={"kind": "region"})
PROGRAMS = [
    Program(id=0, calls=[0, 1, 2, 0]),
    Program(id=1, kind="graph", calls=[0, 0, 1]),
    Program(id=2, calls=[0], graphs=[(0, 1), (1, 1)]),
]


def recorded(path: Path, *steps: StepCoverage) -> Recording:
    write_recording(path, Metadata(), [MM, VIEW, REGION], PROGRAMS)
    coverage.write(path / coverage.FILE, steps)
    return load(path)


def test_steps_are_of_one_kind_by_phase_size_and_graphs(tmp_path: Path) -> None:
    decode, graphs = {"tokens": 8, "sequences": 8}, {"mode": "full", "padded": 16}
    steps = [
        step(kernel(0, 5), **decode),
        step(kernel(0, 1), **decode, **graphs),
        step(kernel(0, 7), **decode),
        step(kernel(0, 99), phase="prefill", tokens=512, sequences=1),
    ]
    kinds = profiled_kinds(recorded(tmp_path, *steps))
    assert [(each.kind.phase, each.kind.mode, len(each.steps), each.gpu_us) for each in kinds] == [
        ("prefill", "eager", 1, 99),
        ("decode", "eager", 2, 12),
        ("decode", "full", 1, 1),
    ]
    assert str(kinds[0].kind) == "prefill, 512 tokens of 1 sequence, eager"
    assert str(kinds[2].kind) == "decode, 8 tokens of 8 sequences, full graphs padded to 16"


@pytest.mark.parametrize(("program", "times"), [(0, 2), (2, 5), (None, 0)])
def test_calls_are_counted_by_the_program_and_its_graphs(program: int | None, times: int, tmp_path: Path) -> None:
    (kind,) = profiled_kinds(recorded(tmp_path, *[step(kernel(0, 5), program=program)] * 3))
    assert kind.invocations == ({0: 3 * times} if times else {})
    assert kind.program == program


def test_a_view_that_copied_after_all_is_counted(tmp_path: Path) -> None:
    (kind,) = profiled_kinds(recorded(tmp_path, step(kernel(0, 5), kernel(1, 2), kernel(2, 3))))
    assert kind.invocations == {0: 2, 1: 1}  # and never a region


def test_the_program_is_the_one_that_most_steps_ran(tmp_path: Path) -> None:
    steps = [step(kernel(0, 5), program=number) for number in (0, 2, 2)]
    (kind,) = profiled_kinds(recorded(tmp_path, *steps))
    assert (kind.program, kind.invocations[0]) == (2, 2 + 5 + 5)


def test_a_recording_without_profiled_steps_says_how_to_get_them(tmp_path: Path) -> None:
    recording = recorded(tmp_path)
    (tmp_path / coverage.FILE).unlink()
    with pytest.raises(FormatError, match="--check-coverage"):
        profiled_kinds(recording)


@pytest.mark.parametrize("steps", [[], [step()]])
def test_profiled_steps_that_used_no_gpu_say_so(steps: list[StepCoverage], tmp_path: Path) -> None:
    with pytest.raises(CallError, match="--check-coverage on a GPU"):
        profiled_kinds(recorded(tmp_path, *steps))


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a Program 7"):
        profiled_kinds(recorded(tmp_path, step(kernel(0, 5), program=7)))


REDUCE = [
    Call(id=number, operator="c10d::allreduce_", args=[Argument(name="group", value=group)])
    for number, group in enumerate((Group(2, 0, "tp"), Group(2, 1, "tp"), Group(3, 0, "ep"), Group(3, 1, "ep")), 3)
]


def of_two_ranks(path: Path, *steps: StepCoverage) -> KindSteps:
    groups = {"tp": [0, 1], "pp": [0]}
    places = [Rank(rank=rank, pid=rank + 1, places={"tp": rank}, groups=groups) for rank in (0, 1)]
    write_recording(path, Metadata(ranks=places, world_size=2), [MM, *REDUCE], PROGRAMS[:0])
    coverage.write(path / coverage.FILE, steps)
    (kind,) = profiled_kinds(load(path))
    return kind


def reduced(call: int, us: float, start: float) -> KernelTime:
    return KernelTime(name="nccl", us=us, call=call, start_us=start, launched_us=-1000.0)


def on_rank(rank: int, *kernels: KernelTime, **more: object) -> StepCoverage:
    return step(*kernels, rank=rank, program=None, **more)


def test_what_a_rank_waits_in_a_collective_for_the_last_one_is_told_apart(tmp_path: Path) -> None:
    """Rank 0 comes 20 µs early to the first, rank 1 5 µs early to the second."""
    first = [kernel(0, 100, 0, launched_us=-1000.0), reduced(3, 30, 100), reduced(3, 10, 130)]
    second = [kernel(0, 120, 0, launched_us=-1000.0), reduced(4, 10, 120), reduced(4, 15, 130)]
    kind = of_two_ranks(tmp_path, on_rank(0, *first), on_rank(1, *second))
    assert [dict(waits) for waits in kind.waits] == [{1: 20, 2: 0}, {1: 0, 2: 5}]
    assert (kind.by_call[3].us, kind.by_call[4].us, kind.by_call[0].us) == (20, 20, 220)
    assert (kind.waited_us, kind.gpu_us) == (25, 260)
    assert kind.span is not None and (kind.span.peers_us, kind.span.own_us) == (12.5, 142.5 - 12.5)


def test_what_both_ranks_wait_in_the_first_collective_of_a_step_is_no_transfer(tmp_path: Path) -> None:
    """A link that had nothing to do takes long to come back. Of two invocations none is the usual one."""
    ranks = [[reduced(call, us, 200.0 * place) for place, us in enumerate((97, 4, 5))] for call in (3, 4)]
    kind = of_two_ranks(tmp_path / "three", *(on_rank(rank, *kernels) for rank, kernels in enumerate(ranks)))
    assert [dict(waits) for waits in kind.waits] == [{0: 92, 1: 0, 2: 0}] * 2 and kind.by_call[3].us == 14
    uneven = [reduced(3, us, 200.0 * place) for place, us in enumerate((9, 4, 6, 8, 5))]
    assert of_two_ranks(tmp_path / "uneven", on_rank(0, *uneven), on_rank(1, *uneven)).waited_us == 0
    fewer = of_two_ranks(tmp_path / "two", *(on_rank(rank, *kernels[:2]) for rank, kernels in enumerate(ranks)))
    assert fewer.waited_us == 0


def test_a_collective_that_not_all_of_its_ranks_profiled_keeps_its_time(tmp_path: Path) -> None:
    steps = [on_rank(0, reduced(3, 30, 0), index=0), on_rank(1, reduced(4, 10, 0), index=1)]
    assert of_two_ranks(tmp_path / "steps", *steps).waited_us == 0
    uneven = [on_rank(0, reduced(3, 30, 0), reduced(3, 9, 40)), on_rank(1, reduced(4, 10, 0))]
    assert of_two_ranks(tmp_path / "uneven", *uneven).waited_us == 0
    without_the_third = [on_rank(0, reduced(5, 30, 0)), on_rank(1, reduced(6, 10, 0))]
    assert of_two_ranks(tmp_path / "three", *without_the_third).waited_us == 0


def test_a_span_is_from_the_first_start_to_the_last_end() -> None:
    found = span_of_step(step(kernel(0, 50, 0), kernel(1, 5, 10), kernel(2, 5, 60)))
    assert found == Span(65, 0)  # the second ended within the first


def test_an_old_step_and_an_empty_one_have_no_span() -> None:
    assert span_of_step(step(kernel(0, 5, 0), kernel(1, 5))) is None
    assert span_of_step(step()) is None
    assert steps_of(step(kernel(0, 5, 0)), step(kernel(0, 5)), gemm=2).span is None


@pytest.mark.parametrize(("launched", "waits"), [(-50.0, 0), (10 - LAUNCH_US, 0), (10.1 - LAUNCH_US, 29), (35.0, 29)])
def test_a_gap_but_for_the_gpus_own_is_the_hosts_where_it_launched_too_late(launched: float, waits: float) -> None:
    assert span_of_step(step(kernel(0, 10, 0), kernel(1, 5, 40, launched_us=launched))) == Span(45, waits)


def test_a_gap_before_a_kernel_of_an_unknown_launch_is_the_gpus() -> None:
    assert span_of_step(step(kernel(0, 10, 0), kernel(1, 5, 40))) == Span(45, 0)


def test_a_gap_counts_from_the_end_of_all_before_it() -> None:
    late = kernel(2, 5, 60, launched_us=55.0)
    assert span_of_step(step(kernel(0, 50, 0), kernel(1, 5, 10), late)) == Span(65, 10 - GAP_US)


def apart(count: int, gap: float, lead: float, **more: object) -> StepCoverage:
    """Kernels of 10 µs with such gaps, each launched `lead` µs before the GPU ran dry."""
    starts = [place * (10 + gap) for place in range(count)]
    return step(*[kernel(0, 10, start, launched_us=start - gap - lead, **more) for start in starts])


@pytest.mark.parametrize("late_by", [0.0, 5.0, 500.0])
def test_the_gpus_own_gap_stays_where_the_host_is_late_for_every_kernel(late_by: float) -> None:
    late = apart(400, 1 + late_by, lead=-late_by)
    of = steps_of(late, late, gemm=800).span
    assert of is not None
    assert of.own_us == pytest.approx(400 * 11 - 1)
    assert of.waits_us == pytest.approx(399 * late_by)


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.0, 8.0])
def test_a_host_that_is_never_late_leaves_the_span_as_it_is(gap: float) -> None:
    early = apart(400, gap, lead=LAUNCH_US + 1)
    of = steps_of(early, gemm=400).span
    assert of is not None
    assert (of.us, of.waits_us) == (pytest.approx(400 * 10 + 399 * gap), 0)


def test_a_late_kernel_keeps_the_gap_that_the_others_of_its_kind_have() -> None:
    early, late = apart(FEWEST_GAPS + 1, 1.4, lead=50.0), apart(5, 21.4, lead=-20.0)
    of = steps_of(early, late, gemm=FEWEST_GAPS + 6).span
    assert of is not None
    assert (of.gap_us, of.waits_us) == (pytest.approx(1.4), pytest.approx(4 * 20 / 2))  # the mean of both steps


def test_a_gap_below_the_gpus_own_is_no_wait() -> None:
    assert span_of_step(apart(9, 0.4, lead=0.0)) == Span(pytest.approx(9 * 10 + 8 * 0.4), 0)


def test_what_tells_nothing_of_a_streams_gaps_is_left_out() -> None:
    """Nodes of a graph, kernels that start before the one before has ended, unknown launches, and too few."""
    early = apart(FEWEST_GAPS + 1, 1.4, lead=50.0)
    assert median_gap([early]) == pytest.approx(1.4)
    assert median_gap([early, *[apart(99, 0.3, lead=50.0, graph=True)] * 9]) == pytest.approx(1.4)
    assert median_gap([early, *[apart(99, -0.1, lead=50.0)] * 9]) == pytest.approx(1.4)
    assert median_gap([early, step(*[kernel(0, 10, 40.0 * place) for place in range(99)])]) == pytest.approx(1.4)
    assert median_gap([early, apart(99, 60.0, lead=0.0)]) == pytest.approx(1.4)
    assert median_gap([apart(FEWEST_GAPS, 1.4, lead=50.0), step(kernel(0, 10))]) == GAP_US


kernels = st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.none() | st.floats(-1e3, 1e3)), min_size=1)


@settings(deadline=None)
@given(kernels)
def test_waits_are_a_part_of_the_span_and_never_of_what_ran(found: list[tuple[float, float, float | None]]) -> None:
    first = min(start for start, _, _ in found)
    ordered = sorted(((start - first, us, launched) for start, us, launched in found), key=lambda one: one[0])
    of = span_of_step(step(*[kernel(0, us, start, launched_us=launched) for start, us, launched in ordered]))
    assert of is not None
    longest = max(us for _, us, _ in ordered)
    assert 0 <= of.waits_us <= of.us - longest + 1e-6


DECODE = StepKind("decode", 2, 2, "eager")
STEPS = steps_by_rank(
    [
        Step(index=0, phase="prefill", tokens=8, sequences=1, lengths=[8], queries=[8]),
        Step(index=1, phase="decode", tokens=2, sequences=2, lengths=[100, 120], queries=[1, 1]),
        Step(index=2, phase="decode", tokens=2, sequences=2, lengths=[200, 220], queries=[1, 1]),
        Step(index=3, phase="decode", tokens=1, sequences=1, lengths=[320], queries=[1]),
        Step(index=2, rank=1, phase="decode", tokens=2, sequences=2, lengths=[150, 171], queries=[1, 1]),
    ]
)


def chosen(lengths: list[int], *samples: tuple[str, int | None, int]) -> NearestSample:
    made = [Sample(call=0, phase=phase, step=at, rank=rank) for phase, at, rank in samples]
    profiled = [step(lengths=lengths, queries=[1] * len(lengths))] if lengths else [step()]
    return nearest_sample(list(enumerate(made)), DECODE, profiled, STEPS)


def test_the_sample_of_the_nearest_context_is_taken() -> None:
    samples = [("decode", 1, 0), ("decode", 2, 0), ("decode", 2, 1)]
    assert [chosen([n, n], *samples).index for n in (100, 110, 160, 161, 300)] == [0, 0, 2, 2, 1]
    assert chosen([110, 110], *samples).context == 1
    assert chosen([105, 105], *samples).context == pytest.approx(220 / 210)


def test_phase_comes_before_size_and_size_before_context() -> None:
    assert chosen([4, 4], ("prefill", 0, 0), ("decode", 2, 0)).index == 1
    assert chosen([160, 160], ("decode", 3, 0), ("decode", 2, 0)).index == 1
    assert [chosen([160, 160], ("decode", at, 0)).sequences for at in (2, 3)] == [2, 1]


def test_a_sample_of_an_unknown_step_comes_last_and_one_alone_is_taken() -> None:
    assert chosen([4, 4], ("decode", 9, 0), ("decode", None, 0), ("decode", 2, 0)).index == 2
    only = chosen([4, 4], ("decode", None, 0))
    assert (only.index, only.context, only.sequences) == (0, None, None)
    assert chosen([4, 4]) == NearestSample()


def test_profiled_steps_without_lengths_take_the_first_of_their_size() -> None:
    found = chosen([], ("prefill", 0, 0), ("decode", 3, 0), ("decode", 2, 0), ("decode", 1, 0))
    assert (found.index, found.context) == (2, None)


def test_context_of_a_prefill_is_tokens_times_length() -> None:
    kind = StepKind("prefill", 8, 1, "eager")
    samples = [(0, Sample(call=0, phase="prefill", step=0))]
    profiled = [step(phase="prefill", lengths=[16], queries=[8])]
    assert nearest_sample(samples, kind, profiled, STEPS).context == 0.5


def test_kernels_in_a_row_have_no_gap() -> None:
    assert span_of_step(step(*in_a_row((0, 5), (1, 6), (2, 7)))) == Span(18, 0)


def test_of_a_real_profile_the_gpus_own_time_is_its_kernels_and_the_gaps_of_a_graph() -> None:
    """Two graph replays and two eager steps, traced on an H200, that were bound by their host.

    In the second and the fourth it was late for all 13 kernels after the first, so that each keeps 1 µs. In the others
    12 gaps in the graph were the GPU's, and it was late for the graph; in the first for the copy after it, too, which
    in the third followed within 1.28 µs.
    """
    trace = read_trace(Path(__file__).parents[2] / "data" / "coverage" / "h200.json.gz")
    found = attribute(trace, [ProfiledStep(index, []) for index in range(4)])
    steps = [covered(one, Step(index=one.index, phase="decode")) for one in found]
    spans = [span_of_step(one) for one in steps]
    assert all(one is not None and one.waits_us > 0.6 * one.us for one in spans)
    gaps = [one.own_us - of.gpu_us for one, of in zip(spans, steps, strict=True) if one is not None]
    assert median_gap(steps) == GAP_US == 1
    assert gaps == [pytest.approx(gap, abs=1e-3) for gap in (3.808 + 1 + 1, 13, 3.712 + 1 + 1.280, 13)]

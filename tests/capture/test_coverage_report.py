"""What is stored and printed of a coverage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.capture.fold.coverage import Attributed, coverage_lines, covered, summarize
from kcap.schemas.recording.recording import Step
from kcap.schemas.results.coverage import Disagreement, KernelTime, StepCoverage
from kcap.show.kernel_name import shorten

GEMM = KernelTime(name="gemm", us=97.5, call=3)
LOST = KernelTime(name="void at::lost<int>(int*)", us=2.5, reason="its launch is unknown")
ADD = Disagreement(operator="aten::add", profiled=3, recorded=2)


def step(index: int, *kernels: KernelTime, differ: tuple[Disagreement, ...] = (), **more: object) -> StepCoverage:
    of = Step.model_validate({"index": 99, "phase": "decode", **more})
    return covered(Attributed(index, list(kernels), list(differ)), of)


def test_a_line_says_what_kind_of_step_it_was() -> None:
    made = step(4, GEMM, LOST, rank=1, tokens=16, sequences=16, mode="full", padded=24, program=2)
    assert (made.index, made.rank, made.tokens, made.sequences) == (4, 1, 16, 16)
    assert (made.phase, made.mode, made.padded, made.program) == ("decode", "full", 24, 2)
    assert (made.gpu_us, made.explained_us) == (100.0, 97.5)


def test_shares_are_of_time_and_not_of_steps() -> None:
    summary = summarize([step(0, GEMM, LOST), step(1, *[GEMM] * 8, mode="full"), step(2, mode="full")])
    assert (summary.steps, summary.kernels, summary.gpu_us) == (3, 10, 880.0)
    assert summary.share == pytest.approx(877.5 / 880)
    assert {mode: (each.steps, each.share) for mode, each in summary.by_mode.items()} == {
        "eager": (1, 0.975),
        "full": (2, 1.0),
    }


def test_what_took_the_longest_comes_first_and_the_list_is_bounded() -> None:
    many = [KernelTime(name=f"k{number}", us=number, reason="why") for number in range(30)]
    summary = summarize([step(0, *many), step(1, LOST, *[many[20]] * 9)]).unexplained
    assert [(item.name, item.count, item.us) for item in summary[:2]] == [("k20", 10, 200.0), ("k29", 1, 29.0)]
    assert len(summary) == 20


def test_one_name_for_two_reasons_is_two_rows() -> None:
    other = LOST.model_copy(update={"reason": "other"})
    assert [item.count for item in summarize([step(0, LOST, other, LOST)]).unexplained] == [2, 1]


def test_the_words_say_the_share_and_what_is_missing() -> None:
    summary = summarize([step(0, GEMM, LOST, differ=(ADD,)), step(1, *[GEMM] * 20, mode="full", differ=(ADD,))])
    assert coverage_lines(summary) == [
        "coverage: 99.8 % of 2.0 ms GPU time in 2 steps is of recorded calls (eager 97.5 %, full 100.0 %)",
        "not of recorded calls:",
        "    2.5 µs    0.1 %       1×  at::lost<…>: its launch is unknown",
        "in 2 of these steps the profiler and the recorder count differently:",
        "  aten::add: profiled 6, recorded 4",
    ]


def test_almost_all_is_not_printed_as_all() -> None:
    summary = summarize([step(0, *[GEMM] * 999, LOST.model_copy(update={"us": 0.01}))])
    assert "coverage: 99.9 %" in coverage_lines(summary)[0]


def test_no_gpu_time_is_no_share() -> None:
    summary = summarize([step(0), step(1)])
    assert summary.share is None
    assert coverage_lines(summary) == ["coverage: the profiler saw no GPU time in 2 steps"]
    assert coverage_lines(summarize([])) == ["coverage: the profiler saw no GPU time in 0 steps"]


def test_a_long_table_says_where_the_rest_is() -> None:
    many = [KernelTime(name=f"k{number}", us=1, reason="why") for number in range(11)]
    printed = coverage_lines(summarize([step(0, *many)]))
    assert len(printed) == 13
    assert printed[-1].endswith("the rest is in coverage.jsonl")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("triton_poi_fused_mul_silu_slice_1", "triton_poi_fused_mul_silu_slice_1"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("void f<int, g<2> >::h<3>(int, g<2>*)", "f<…>::h<…>"),
        ("void (anonymous namespace)::softmax<float, 9>(float*)", "(anonymous namespace)::softmax<…>"),
        ("void a::(anonymous namespace)::k(int)", "a::(anonymous namespace)::k"),
        ("bool operator< <int>(int)", "bool operator< <…>"),
        ("void k<&operator->*>(int)", "k<…>"),
        ("k<(lambda(int)#1)>(int)::operator()(float)", "k<…>"),
        ("unbalanced<int", "unbalanced<int"),
        ("n" * 100, "n" * 71 + "…"),
        ("", ""),
    ],
)
def test_a_cpp_name_is_cut_to_what_a_table_can_hold(name: str, short: str) -> None:
    assert shorten(name) == short


@given(st.text("<>()ab: operator->", max_size=200))
def test_any_name_is_shortened_to_the_width(name: str) -> None:
    assert len(shorten(name, 40)) <= 40

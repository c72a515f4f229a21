"""Which Calls and Programs of a Recording are replayed for its fidelity, and what becomes of the answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import CALLS, in_a_row, judged, kernel, step, steps_of, times
from rich.console import Console

from kcap.errors import CallError
from kcap.replay.fidelity import report
from kcap.replay.fidelity.engine import KindSteps, profiled_kinds
from kcap.replay.fidelity.figure import draw_figure, fill_figure
from kcap.replay.fidelity.replaying import (
    NO_DURATIONS,
    NO_PROGRAM,
    ON_HOST,
    ChosenSamples,
    FidelityRun,
    NearestSample,
    replay_kinds,
    replayed_call,
)
from kcap.replay.fidelity.verdict import Fidelity, KindFidelity, ProgramTime
from kcap.schemas.recording.recording import Argument, Call, Metadata, Program, Sample, Step, load, write_recording
from kcap.schemas.recording.values import Drift
from kcap.schemas.results import coverage
from kcap.schemas.results.measurement import KernelDuration, Measurement, Method, ProgramCall, ProgramMeasurement

GEMM, NORM = CALLS[0], CALLS[2].model_copy(update={"id": 2})
FLASH = Call(id=1, operator="lib::flash", args=[Argument(value=Drift("int"))])
STEPS = [
    Step(index=0, phase="decode", tokens=1, sequences=1, lengths=[10], queries=[1]),
    Step(index=1, phase="decode", tokens=1, sequences=1, lengths=[99], queries=[1]),
]
SAMPLES = [Sample(call=1, phase="decode", step=index, scalars={"0": index}, compared=index == 1) for index in (0, 1)]
Make = Callable[..., FidelityRun]
KERNELS = in_a_row((0, 50), (1, 30), (0, 50), (2, 10))


class Replays:
    """Answers with these times, and keeps what it was asked."""

    def __init__(self, us: dict[int, float | None], program_us: float | None = 140) -> None:
        self.us, self.program_us = us, program_us
        self.asked: list[tuple[int, int | None]] = []
        self.programs: list[tuple[int, dict[int, int | None]]] = []

    def call(self, call: Call, chosen: NearestSample, kind: KindSteps) -> Measurement:
        self.asked.append((call.id, chosen.index))
        known = {"call": call.id, "operator": call.operator, "sample": chosen.index}
        us = self.us.get(call.id, -1)
        if us == -1:
            return Measurement(**known, status="skipped", reason="no library")
        names = [KernelDuration(name=call.operator.removeprefix("lib::"), us=us)] if us is not None else []
        return Measurement(**known, median_us=1e9, kernel_us=us, kernels=names)

    def program(self, number: int, chosen: ChosenSamples, kind: KindSteps) -> ProgramMeasurement:
        self.programs.append((number, {call: one.index for call, one in chosen.items()}))
        if self.program_us is None:
            return ProgramMeasurement(program=number, status="failed", reason="crashed")
        calls = [ProgramCall(call=0, operator="lib::gemm", count=2, us=51)]
        calls += [ProgramCall(call=1, operator="lib::flash", count=1, status="skipped", reason="no library")]
        calls += [ProgramCall(call=2, operator="lib::norm", count=1, status="host", us=7)]
        return ProgramMeasurement(program=number, median_us=self.program_us, calls=calls, invocations=4)


@pytest.fixture
def ran(tmp_path: Path) -> Make:
    """Runs the fidelity of a Recording with two profiled decode steps."""

    def make(replays: Replays, program: int | None = 0) -> FidelityRun:
        path = tmp_path / "rec.kcap"
        write_recording(path, Metadata(), [GEMM, FLASH, NORM], [Program(id=0, calls=[0, 1, 0, 2])], STEPS, SAMPLES)
        profiled = {"tokens": 1, "sequences": 1, "lengths": [97], "queries": [1], "program": program}
        coverage.write(path / coverage.FILE, [step(*KERNELS, **profiled)] * 2)
        recording = load(path)
        return replay_kinds(recording, profiled_kinds(recording), replays)

    return make


def test_every_call_is_replayed_once_on_its_nearest_sample_drawn_or_not_and_the_program_on_the_same(ran: Make) -> None:
    replays = Replays({0: 50, 1: 30, 2: 10})
    found = ran(replays)
    assert replays.asked == [(0, None), (1, 1), (2, None)]
    assert replays.programs == [(0, {0: None, 1: 1, 2: None})]
    assert found.fidelity.holds
    assert [row.replayed.context for row in found.fidelity.kinds[0].serving.rows] == [
        None, pytest.approx(99 / 97), None
    ]  # fmt: skip
    assert (len(found.measurements), len(found.programs)) == (3, 1)


def test_back_to_back_time_never_stands_for_kernel_durations(ran: Make) -> None:
    (kind,) = ran(Replays({0: 50, 1: None, 2: 10})).fidelity.kinds
    assert [(one.name, one.reason) for one in kind.serving.missing] == [("lib::flash", NO_DURATIONS)]


@pytest.mark.parametrize(
    ("method", "kernel_us", "us", "reason"),
    [
        ("graph", 5.0, 5.0, ""),
        ("none", None, 0.0, ""),
        ("host", None, None, ON_HOST),
        ("events", None, None, NO_DURATIONS),
    ],
)
def test_nothing_launched_is_no_time_and_the_hosts_time_is_none_of_the_gpus(
    method: Method, kernel_us: float | None, us: float | None, reason: str
) -> None:
    made = Measurement(call=0, operator="a::b", method=method, median_us=7.0, kernel_us=kernel_us)
    found = replayed_call(made, NearestSample())
    assert (found.us, found.reason) == (us, reason)


def test_what_was_skipped_is_missing_with_its_reason_in_both_states(ran: Make) -> None:
    (kind,) = ran(Replays({0: 50, 2: 10})).fidelity.kinds
    assert [(one.name, one.reason) for one in kind.serving.missing] == [("lib::flash", "skipped: no library")]
    assert [(one.name, one.reason) for one in kind.in_program.missing] == [
        ("lib::flash", "skipped: no library"), ("lib::norm", ON_HOST)
    ]  # fmt: skip
    assert [row.ratio for row in kind.in_program.rows] == [pytest.approx(51 / 50)]


def test_a_program_that_failed_says_why(ran: Make) -> None:
    (kind,) = ran(Replays({0: 50, 1: 30, 2: 10}, None)).fidelity.kinds
    assert list(kind.violations()) == ["the Program was not replayed as a whole: crashed"]


def test_steps_of_no_program_are_missing_and_not_forgotten(ran: Make) -> None:
    (kind,) = ran(Replays({0: 50, 1: 30, 2: 10}), None).fidelity.kinds
    assert (kind.serving.rows, kind.serving.missing_us, kind.program.reason) == ([], 140, NO_PROGRAM)


def printed(found: Fidelity, capsys: pytest.CaptureFixture[str], rows: int = 40) -> str:
    report.print_kinds(Console(width=160, highlight=False), found, {"device_name": "NVIDIA H200"}, rows)
    return capsys.readouterr().out


def test_the_table_has_kernels_what_is_missing_totals_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    engine = steps_of(step(*in_a_row((0, 80), (1, 14), (None, 6))), gemm=1, flash=1)
    text = printed(Fidelity([judged(engine, times({0: 80, 1: 28}))]), capsys)
    for words in (
        "decode, 4 tokens of 4 sequences, eager: 1 step profiled",
        "80.00 µs",
        "200.0%",
        "missing",
        "lost: no recorded call",
        "in total, 20.0% off in serving, 20.0% in the Program",
        "the step's span, less 0.00 µs of waiting for the host",
        "outside the bounds: decode",
        "serving: lib::flash (14.0% of the time) takes 200.0% of its time in the engine",
    ):
        assert words in text, words


@pytest.mark.parametrize(("name", "told"), [("NVIDIA H200", False), ("NVIDIA A100", True), (None, False)])
def test_another_gpu_than_the_engines_is_told(name: str | None, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report.print_kinds(Console(width=160), Fidelity([]), {"device_name": "NVIDIA H200"}, 3, name)
    assert ("recorded on NVIDIA A100" in capsys.readouterr().out) is told


def test_a_short_table_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    engine = steps_of(step(*KERNELS), gemm=2, flash=1, norm=1)
    text = printed(Fidelity([judged(engine, times({0: 50, 1: 30, 2: 10}))]), capsys, rows=1)
    assert "2 more kernels, 28.6% of the time: --rows 3" in text
    assert "within the bounds, by serving and the Program: decode" in text
    assert "lib::flash" not in text


def test_a_program_that_lacks_kernels_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    engine = steps_of(step(*KERNELS), gemm=2, flash=1, norm=1)
    whole = ProgramTime(140.0, "", 0, 4, 1, 2.5)
    text = printed(Fidelity([judged(engine, times({0: 50, 1: 30, 2: 10}), program=whole)]), capsys)
    assert "the Program lacks 1 of its 4 kernels" in text
    assert "2.50 µs of the Program's kernels are of no known call" in text


def test_the_picture_is_a_png_also_of_nothing_replayed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine = steps_of(step(*KERNELS), gemm=2, flash=1, norm=1)
    old = steps_of(step(kernel(0, 1.0)), gemm=1)
    kinds = [judged(engine, times({0: 50, 1: 60})), judged(old, {}, program=ProgramTime(None, "none"))] * 4
    for number, found in enumerate((Fidelity(kinds), Fidelity(kinds[1:2]))):
        path = tmp_path / f"{number}.png"
        draw_figure(found, path, "a model")
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(content[16:20]) == 2200  # pixels across


def drawn(kinds: list[KindFidelity]) -> set[str]:
    """The words in the picture of `kinds`."""
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot, text

    figure, axes = pyplot.subplots(1, 2)
    fill_figure(figure, axes, Fidelity(kinds), "a model")
    words = {one.get_text() for one in figure.findobj(text.Text)}
    pyplot.close(figure)
    return words


def test_the_picture_names_the_state_of_its_dots() -> None:
    engine, off = steps_of(step(*KERNELS), gemm=2, flash=1, norm=1), times({0: 80, 1: 30, 2: 10})
    right = times({0: 50, 1: 30, 2: 10})
    words = drawn([judged(engine, right, off), judged(engine, off, right)])
    assert {"decode, batch 4, eager: serving", "decode, batch 4, eager: Program"} <= words


@pytest.mark.parametrize(
    ("count", "told"),
    [(6, []), (7, ["not shown: 1 more kind of steps, 14.3% of the GPU time"]),
     (8, ["not shown: 2 more kinds of steps, 25.0% of the GPU time"])],
)  # fmt: skip
def test_the_picture_says_what_it_has_no_colour_for(count: int, told: list[str]) -> None:
    engine = steps_of(step(*KERNELS), gemm=2, flash=1, norm=1)
    words = drawn([judged(engine, times({0: 50, 1: 30, 2: 10}))] * count)
    assert [one for one in words if one.startswith("not shown")] == told


def test_a_picture_without_matplotlib_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CallError, match=r"pip install kcap\[plots\]"):
        draw_figure(Fidelity([]), tmp_path / "f.png")
    assert not list(tmp_path.iterdir())

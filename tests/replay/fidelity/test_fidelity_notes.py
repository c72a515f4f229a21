"""What measurements tell beside their times reaches the user: under the table, in its rows, and in the JSON."""

from __future__ import annotations

from typing import Any

import pytest
from profiled import CALLS, NAMES, in_a_row, judged, step, steps_of, times
from rich.console import Console

from kcap.replay.fidelity import report
from kcap.replay.fidelity.compare import ReplayedCall
from kcap.replay.fidelity.replaying import NearestSample, program_time, replayed_call
from kcap.replay.fidelity.report import kind_notes
from kcap.replay.fidelity.run import fidelity_document
from kcap.replay.fidelity.verdict import Fidelity, KindFidelity, ProgramTime
from kcap.replay.program.flow import NOT_HANDED_ON
from kcap.replay.timing.sampling import BLOCKER_TIMED_OUT, WAITS_FOR_GPU
from kcap.schemas.results.measurement import (
    AT_FLOOR,
    DROPPED,
    Cache,
    KernelDuration,
    Measurement,
    Method,
    ProgramMeasurement,
)

ENGINE = steps_of(step(*in_a_row((0, 50), (1, 30), (0, 50), (2, 10))), gemm=2, flash=1, norm=1)
US = {0: 50.0, 1: 30.0, 2: 10.0}
RIGHT = times(US)


def measured(call: int, sequences: int | None = None, **more: Any) -> ReplayedCall:
    """A Call replayed as long as it took in the engine, on a Sample of so many `sequences`."""
    kernels = [KernelDuration(name=NAMES[call], us=US[call])]
    known = {"method": "graph", "cache": "serving", "stop": "converged", "samples_us": [1.0] * 10, "kernels": kernels}
    made = Measurement(call=call, operator=CALLS[call].operator, **{"kernel_us": US[call], **known, **more})
    return replayed_call(made, NearestSample(sequences=sequences))


def program(**more: Any) -> ProgramTime:
    known = {"median_us": 140.0, "method": "graph", "stretches": 1, "cache": "serving", "stop": "converged"}
    return program_time(ProgramMeasurement(program=0, **{**known, **more}))


def printed(capsys: pytest.CaptureFixture[str], *kinds: KindFidelity) -> str:
    report.print_kinds(Console(width=200, highlight=False), Fidelity([*kinds]), {"device_name": "NVIDIA H200"}, 40)
    return capsys.readouterr().out


def alone(**more: Any) -> KindFidelity:
    """Of three Calls, those named with what their measurements tell."""
    return judged(ENGINE, {call: measured(call, **more.get(name, {})) for call, name in NAMES.items()}, RIGHT)


def test_a_note_is_told_once_with_its_kernels_and_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    notes = [WAITS_FOR_GPU, AT_FLOOR]
    text = printed(capsys, alone(gemm={"notes": notes[:1]}, flash={"notes": notes[:1]}, norm={"notes": notes}))
    assert f"3 kernels, 100.0% of the time: {WAITS_FOR_GPU}\n" in text
    assert f"1 kernel, 7.1% of the time: {AT_FLOOR}\n" in text
    assert text.count(WAITS_FOR_GPU) == 1


def test_dropped_samples_are_one_remark_however_many_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    slow = {f"{NAMES[call]}": {"notes": [f"{call + 1} {DROPPED}"], "slow_samples": [0]} for call in (0, 1)}
    assert f"2 kernels, 92.9% of the time: {DROPPED}\n" in printed(capsys, alone(**slow))


def test_a_batch_that_no_sample_is_of_is_told_with_what_was_replayed_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind = alone(gemm={"sequences": 12}, flash={"sequences": 4}, norm={"sequences": 12})  # steps are of 4
    text = printed(capsys, kind)
    assert "2 kernels, 78.6% of the time: replayed on a batch of 12, as no Sample is of one of 4\n" in text
    assert text.count("no Sample is of") == 1
    rows = fidelity_document(Fidelity([kind]))["kinds"][0]["states"]["serving"]["kernels"]
    assert [row["sequences"] for row in rows] == [12, 4, 12]


def test_a_note_on_what_is_missing_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    note = "no kernel durations: the profiler saw no kernel (is another one running?)"
    text = printed(capsys, alone(flash={"notes": [note], "kernel_us": None, "kernels": []}))
    assert f"1 kernel, 21.4% of the time: {note}" in text


@pytest.mark.parametrize(
    ("cache", "method", "marked"),
    [("warm", "graph", True), ("warm", "events", True), ("serving", "graph", False), ("warm", "none", False)],
)
def test_what_was_replayed_warm_is_marked(
    cache: Cache, method: Method, marked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = alone(flash={"cache": cache, "method": method})
    text = printed(capsys, kind)
    assert ("100.0%\u2021" in text) is marked
    assert ("\u2021 1 kernel, 21.4% of the time: replayed with warm caches and not as in serving" in text) is marked
    rows = fidelity_document(Fidelity([kind]))["kinds"][0]["states"]["serving"]["kernels"]
    assert [(row["warm"], row["how"]["cache"]) for row in rows] == [
        (False, "serving"), (marked, cache), (False, "serving")
    ]  # fmt: skip


@pytest.mark.parametrize("note", [WAITS_FOR_GPU, BLOCKER_TIMED_OUT, NOT_HANDED_ON])
def test_a_note_on_the_program_is_told(note: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = judged(ENGINE, RIGHT, program=program(notes=[note]))
    assert f"the Program: {note}\n" in printed(capsys, kind)
    assert fidelity_document(Fidelity([kind]))["kinds"][0]["program"]["how"]["notes"] == (note,)


def test_a_program_in_parts_or_cut_short_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, judged(ENGINE, RIGHT, program=program(stretches=3, method="events", stop="limit")))
    assert "the Program took 3 CUDA graphs\n" in text
    assert "the time was up before the Program's samples agreed\n" in text


@pytest.mark.parametrize(("engine", "replay", "told"), [(1740, 1980, True), (1940, 1980, False), (None, 1980, False)])
def test_another_clock_in_the_engine_is_told(
    engine: int | None, replay: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = in_a_row((0, 50), (1, 30), (2, 10))
    steps = steps_of(*[step(*kernels, sm_mhz=mhz) for mhz in (engine, None, engine)], gemm=3, flash=3, norm=3)
    kind = judged(steps, RIGHT, program=program(clocks={"sm_mhz": replay}))
    line = "the GPU's clock was 1,740 MHz in the engine and 1,980 MHz in the Program: times differ\n"
    assert (line in printed(capsys, kind)) is told
    (found,) = fidelity_document(Fidelity([kind]))["kinds"]
    assert (found["sm_mhz"], found["program"]["sm_mhz"]) == (engine, replay)


def test_a_program_that_failed_keeps_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    kind = judged(
        ENGINE, RIGHT, program=program(status="failed", reason="crashed", median_us=None, notes=[NOT_HANDED_ON])
    )
    assert f"the Program: {NOT_HANDED_ON}\n" in printed(capsys, kind)


def test_the_document_has_how_each_time_came_about() -> None:
    kind = alone(gemm={"notes": [AT_FLOOR], "slow_samples": [3, 4], "stop": "limit", "method": "events"})
    how = fidelity_document(Fidelity([kind]))["kinds"][0]["states"]["serving"]["kernels"][0]["how"]
    assert how == {
        "method": "events", "cache": "serving", "stop": "limit", "samples": 10, "slow_samples": 2, "notes": (AT_FLOOR,)
    }  # fmt: skip


def test_what_has_no_notes_has_no_remarks() -> None:
    assert list(kind_notes(judged(ENGINE, {n: measured(n) for n in NAMES}, RIGHT, program()), 40)) == []


def test_the_verdict_names_the_state_by_which_a_kind_holds_and_what_the_total_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    off = times({**US, 2: 20.0})
    kinds = judged(ENGINE, RIGHT, RIGHT), judged(ENGINE, RIGHT, off), judged(ENGINE, off, RIGHT), judged(ENGINE, off)
    lines = printed(capsys, *kinds).splitlines()
    total = next(line for line in lines if line.startswith("in all profiled steps"))
    assert total.endswith("(kinds of steps: 3 by serving and 1 by the Program)")
    assert [line.split(": ")[0] for line in lines if "the bounds" in line] == [
        "within the bounds, by serving and the Program",
        "within the bounds, by serving",
        "within the bounds, by the Program",
        "outside the bounds",
    ]

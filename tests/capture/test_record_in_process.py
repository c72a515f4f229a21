"""`kcap.record()` where something else records, and where the program goes to another directory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import kcap
from kcap.capture.hooks.imports import _finder
from kcap.errors import CallError

A = torch.eye(4)


def adds(path: Path) -> int:
    return sum(call.total for call in kcap.load(path).kernels() if call.operator == "aten::add.Tensor")


def test_a_relative_output_is_where_it_was_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    with kcap.record("out"):
        torch.add(A, A)
        os.chdir("elsewhere")
    assert adds(tmp_path / "out") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]


def test_of_several_threads_one_records_and_the_others_are_told(tmp_path: Path) -> None:
    refusals: list[str] = []
    together, done = threading.Barrier(3), threading.Barrier(3)

    def record(number: int) -> None:
        together.wait(60)
        try:
            with kcap.record(tmp_path / str(number)):
                torch.add(A, A)
                done.wait(60)
        except CallError as error:
            refusals.append(str(error))
            done.wait(60)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (recorded,) = tmp_path.iterdir()
    assert adds(recorded) == 1
    assert refusals == [f"this process is recorded already, into {recorded}: close that recording first"] * 2


def test_a_recording_that_could_not_begin_does_not_keep_the_next_from_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CallError, match="no Recording"), kcap.record(tmp_path / "file"):
        pass
    with kcap.record(tmp_path / "out"):
        torch.add(A, A)
    assert adds(tmp_path / "out") == 1


def counted(path: Path) -> dict[tuple[str, str], int]:
    """Invocations of additions and products by operator and phase."""
    found: dict[tuple[str, str], int] = {}
    for call in kcap.load(path).kernels():
        for count in call.counts:
            if call.operator in ("aten::add.Tensor", "aten::mul.Tensor"):
                found[call.operator[6:9], count.phase] = found.get((call.operator[6:9], count.phase), 0) + count.count
    return found


@pytest.mark.parametrize("longer", ["first", "second"])
def test_beside_another_threads_step_a_step_is_none_and_its_calls_count(longer: str, tmp_path: Path) -> None:
    begun, second, over = threading.Event(), threading.Event(), threading.Event()
    with kcap.record(tmp_path / "out") as recorder:

        def first() -> None:
            with recorder.step("prefill", queries=[7], lengths=[7]):
                for _ in range(100):
                    torch.add(A, A)
                begun.set()
                (over if longer == "first" else second).wait(60)
                for _ in range(100):
                    torch.add(A, A)
            over.set()

        def other() -> None:
            begun.wait(60)
            with recorder.step("decode", queries=[1], lengths=[9]):
                for _ in range(10):
                    torch.mul(A, A)
                second.set()
                if longer == "second":
                    over.wait(60)
            over.set()

        threads = [threading.Thread(target=target) for target in (first, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counted(tmp_path / "out") == {("add", "prefill"): 200, ("mul", "other"): 10}
    (step,) = kcap.load(tmp_path / "out").steps
    assert (step.phase, step.queries) == ("prefill", [7])


def test_the_programs_own_marks_count_in_a_block_too(tmp_path: Path) -> None:
    with kcap.record(tmp_path / "out"):
        for length in range(3):
            with kcap.step("decode", queries=[1], lengths=[length + 1]), kcap.step("prefill"):
                torch.add(A, A)
    with kcap.step("decode"):
        torch.add(A, A)
    recording = kcap.load(tmp_path / "out")
    assert recording.metadata.steps == {"decode": 3}
    assert counted(recording.path) == {("add", "decode"): 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": "a", "lengths": [5]},
        {"queries": [1.5]},
        {"queries": [2**70]},
        {"queries": [-1]},
        {"queries": [1], "lengths": [2, 3]},
        {"queries": 3},
        {"phase": "decoding"},
    ],
    ids=str,
)
def test_a_step_that_there_cannot_be_is_refused_and_the_recording_goes_on(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    with kcap.record(tmp_path / "out") as recorder:
        for mark in (kcap.step, recorder.step):
            with pytest.raises(CallError), mark(**{"phase": "decode", **wrong}):
                pytest.fail("it began")
        with recorder.step("decode", queries=[1], lengths=[1]):
            torch.add(A, A)
    assert counted(tmp_path / "out") == {("add", "decode"): 1}
    with pytest.raises(CallError), kcap.step(**{"phase": "decode", **wrong}):
        pytest.fail("it began")


@pytest.mark.parametrize("wrong", [{"model": 123}, {"model": "\ud800"}, {"model": ""}, {"recorder": "natve"}], ids=str)
def test_what_a_recording_cannot_be_of_is_refused_at_once(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CallError, match=next(iter(wrong))), kcap.record(tmp_path / "out", **wrong):
        pytest.fail("it began")
    assert not [*tmp_path.iterdir()]


INNER = """
import os
import torch, kcap

with kcap.step("decode"):
    torch.add(torch.ones(2), 1)
try:
    with kcap.record("inner"):
        pass
except kcap.errors.CallError as error:
    print(os.getppid(), error)
"""


def test_under_kcap_record_it_says_who_records_already(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INNER)
    words = [sys.executable, "-m", "kcap", "record", "-o", "outer", "--", sys.executable, "program.py"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    parent, _, error = ran.stdout.partition(" ")
    assert error.startswith(f"kcap record (process {parent}) records this program already, into {tmp_path / 'outer'}: ")
    assert adds(tmp_path / "outer") == 1
    assert not (tmp_path / "inner").exists()


def test_a_recording_that_ended_is_held_by_nothing(tmp_path: Path) -> None:
    """Neither by what waits for modules that are never imported."""

    def window() -> weakref.ref[Any]:
        with kcap.record(tmp_path / "out") as recorder:
            assert len(_finder.hooks["sglang.srt.distributed.device_communicators.pynccl"]) > 0
        return weakref.ref(recorder._window)

    before = {name: len(hooks) for name, hooks in _finder.hooks.items()}
    ended, deadline = window(), time.monotonic() + 20  # the thread that watches it ends a little later
    while ended() is not None and time.monotonic() < deadline:
        time.sleep(0.1)
        gc.collect()
    assert ended() is None
    assert {name: len(hooks) for name, hooks in _finder.hooks.items()} == before

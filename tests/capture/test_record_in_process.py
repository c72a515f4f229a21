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

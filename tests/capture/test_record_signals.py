"""Signals to `kcap record` while it records: each asks it to end in order, or to open and close the window."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kcap as kcap_package
from kcap.capture.controller.child import SignalLog

STEPS = """
import os, signal, sys, time
import torch
import kcap

def step():
    with torch.no_grad(), kcap.step("decode"):
        torch.mm(torch.eye(4), torch.eye(4))

"""
SIGNALS = """
step()
number, asks = int(sys.argv[1]), sys.argv[2] == "asks"
signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # as many programs do
os.kill(os.getppid(), number)
time.sleep(60 if asks else 1)
sys.exit(5)
"""
GOES_ON = """
while True:
    step()
    print("stepped", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_kcap_is_asked_to_end_has_not_failed(number: int, tmp_path: Path) -> None:
    def heeds() -> None:  # however the tests were started: nohup ignores SIGHUP, a shell's background job SIGINT
        signal.signal(number, signal.SIG_DFL)

    assert record_signalled(tmp_path, number, "asks", heeds) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_start_leaves_nothing(number: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kcap", "record", "--model", "kcap/tiny-llama", "-o", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    while process.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 1 and not list(tmp_path.iterdir())
    assert said in ("kcap: stopped", "kcap: ended before anything was started; nothing is kept")


def test_under_nohup_a_recording_goes_on(tmp_path: Path) -> None:
    ended = record_signalled(tmp_path, signal.SIGHUP, "not", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert ended == (5, ["the command ended with status 5"])


def record_signalled(
    tmp_path: Path, number: int, asks: str, before: Callable[[], object] | None = None
) -> tuple[int, list[str]]:
    """The exit code and the notes of a command that sends a signal to kcap, and by itself ends with status 5."""
    script = tmp_path / "engine.py"
    script.write_text(STEPS + SIGNALS)
    words = ["record", "-o", str(tmp_path / "out"), "--", sys.executable, str(script), str(int(number)), asks]
    ran = subprocess.run(
        [sys.executable, "-m", "kcap", *words], capture_output=True, text=True, timeout=120, preexec_fn=before
    )
    return ran.returncode, kcap_package.load(tmp_path / "out").metadata.notes


def test_a_signal_that_ends_nothing_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    with SignalLog(signal.SIGTERM) as log:
        os.kill(os.getpid(), signal.SIGTERM)
        log.answer = "it is being written"
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "kcap: it is being written\n"
    assert log.insists


def test_a_recording_is_finished_when_its_terminal_is_gone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS + GOES_ON)
    words = ["record", "-o", str(tmp_path / "out"), "--", sys.executable, str(tmp_path / "program.py")]
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        os.execv(sys.executable, [sys.executable, "-m", "kcap", *words])
    seen = b""
    while b"stepped" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    recording = kcap_package.load(tmp_path / "out")
    assert os.waitstatus_to_exitcode(status) == 0
    assert recording.metadata.complete


@pytest.mark.parametrize("gone", ["pipe", "disk"])
def test_a_recording_is_finished_when_its_standard_error_is_gone(gone: str, tmp_path: Path) -> None:
    if gone == "pipe":
        reader, errors = os.pipe()
        os.close(reader)
    else:
        errors = os.open("/dev/full", os.O_WRONLY)
    (tmp_path / "program.py").write_text(STEPS + SIGNALS)
    words = ["record", "-o", str(tmp_path / "out"), "--", sys.executable, str(tmp_path / "program.py"), "2", "asks"]
    ran = subprocess.run(
        [sys.executable, "-m", "kcap", *words], stderr=errors, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(errors)
    assert ran.returncode == 0
    assert kcap_package.load(tmp_path / "out").metadata.complete

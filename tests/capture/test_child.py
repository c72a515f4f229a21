"""What kcap starts ends with kcap, and nothing of it is left; what is said of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ended, lives

from kcap.capture.controller import watchdog
from kcap.capture.controller.child import Child, last_lines

TWO = "trap '' INT; sleep 600 & sleep 600; true"  # a shell with two processes, none of which SIGINT ends
STARTS = f"""
import os, time
from kcap.capture.controller.child import Child
child = Child(["sh", "-c", "echo $$ >&2; exec 0<&- 1<&- 2<&-; {TWO}"], dict(os.environ))
time.sleep(600)
"""


def wait_for(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    return int(process.stderr.readline())


@pytest.fixture
def group() -> Iterator[int]:
    """Of a process that heeds no SIGTERM, with one of its own."""
    words = ["sh", "-c", "trap '' TERM; sleep 600 & echo up; sleep 600"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    yield process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_of_a_command_end_with_a_kcap_that_is_killed(number: int) -> None:
    kcap = subprocess.Popen([sys.executable, "-c", STARTS], stderr=subprocess.PIPE, text=True)
    group = wait_for(kcap)
    time.sleep(0.3)
    assert lives(group)
    kcap.send_signal(number)
    kcap.communicate()
    assert ended(group)


def test_what_a_command_leaves_is_ended() -> None:
    child = Child(["sh", "-c", "sleep 600 & exit 3"], dict(os.environ))
    group = child._process.pid
    while child.status is None:
        time.sleep(0.01)
    assert lives(group)
    assert child.end() == 3
    assert ended(group)


def test_nothing_watches_what_has_ended() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    Child(["true"], dict(os.environ)).end()
    assert children.read_text() == before


def test_what_does_not_heed_sigterm_is_killed(group: int) -> None:
    watchdog.end_group(group, 0.3)
    assert ended(group)


SHARES = """
import os, signal, sys, time
from multiprocessing import shared_memory
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
name = shared_memory.SharedMemory(create=True, size=64).name
if os.fork() == 0:
    if "apart" in sys.argv:
        os.setsid()
    print(name, file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["together", "apart"])
def test_shared_memory_of_what_is_killed_is_removed(where: str) -> None:
    """Python has a process for that, which must end last, after what has a session of its own, too."""
    command = [sys.executable, "-c", SHARES, where]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    memory = Path("/dev/shm", process.stderr.readline().strip())
    started = watchdog.descendants(process.pid)
    assert memory.is_file() and len(started) == 2, "the fork and the tracker"
    watchdog.end_group(process.pid, 0.2, started)
    process.communicate()
    assert not memory.exists()


WRITES_HALF_A_LINE = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: os._exit(0))
print("half", end="", flush=True)
time.sleep(60)
"""


def test_a_line_that_was_not_ended_is_ended_for_what_follows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = Child([sys.executable, "-c", WRITES_HALF_A_LINE], os.environ, tmp_path / "log")
    while not (tmp_path / "log").read_bytes():
        time.sleep(0.02)
    child.show()
    child.end()
    assert capfd.readouterr().err == "half"
    child.show()
    child.show()
    assert capfd.readouterr().err == "\n"


def test_the_last_errors_of_an_output_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"ValueError: {number}\n" for number in (*range(9), 7)) + "a last line\n")
    assert last_lines(log, 1).split("\n") == [f"  ValueError: {number}" for number in (4, 5, 6, 8, 7)]
    assert last_lines(log, -9).endswith("ValueError: 7\n  a last line")


def test_an_error_that_lists_all_models_is_cut(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"ValueError: not supported: {'Llama, ' * 1000}\n")
    line = last_lines(tmp_path / "log", 1)
    assert line.startswith("  ValueError: not supported: Llama") and line.endswith(" … (7,026 characters)")
    assert len(line) < 700


FAILED_START = """\
INFO 11-23 [config.py:1] Resolved architecture
WARNING 11-23 [cuda.py:7] no NVML: ImportError: libnvidia-ml.so.1: cannot open shared object file
Traceback (most recent call last):
  File "arg_utils.py", line 1955, in create_model_config
    return ModelConfig(
pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (100000) is greater than 2048
warnings.py:9: UserWarning: a resource leaked, perhaps RuntimeError: none
"""


def test_an_error_goes_on_for_its_details_and_what_was_warned_of_is_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(FAILED_START)
    assert last_lines(log, 1).split("\n") == [
        "  pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "    Value error, max_model_len (100000) is greater than 2048",
    ]
    log.write_text("Traceback (most recent call last):\n    assert ready\nAssertionError\n")
    assert last_lines(log, 1) == "  AssertionError"
    log.write_text("(Worker) OSError: no space\n(Worker) Traceback (most recent call last):\n(Worker)   File 'a.py'\n")
    assert last_lines(log, 1) == "  OSError: no space", "another error's traceback is none of its details"
    log.write_text("")
    assert last_lines(log, 1) == "  (none)"
    log.write_text("vllm.v1.exceptions.EngineDeadError: its root cause is above\n")
    assert last_lines(log, 1) == "  vllm.v1.exceptions.EngineDeadError: its root cause is above"

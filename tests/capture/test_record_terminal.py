"""A program under `kcap record` has kcap's own streams, and its terminal where there is one."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kcap as kcap_package

STEP = """
import sys, time
import torch
import kcap

def step():
    with torch.no_grad(), kcap.step("decode"):
        torch.mm(torch.eye(4), torch.eye(4))

step()
"""
STREAMS = """
print(f"out: {sys.stdin.read()}")
print("err", file=sys.stderr)
"""
ASKS = """
import getpass
name = input("name? ")
secret = getpass.getpass("secret? ")  # from /dev/tty, without echo
step()
print("hello", name, len(secret))
open("/dev/tty", "w").write("on the terminal\\n")
"""
DRAWS = """
for percent in range(0, 101, 10):
    print(f"\\r{percent:3}%", end="", flush=True)
    time.sleep(0.1)
"""
WAITS = """
try:
    print('waits', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(9)
"""
Run = Callable[..., "Terminal"]


def test_a_program_keeps_its_output_its_errors_and_its_input_apart(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEP + STREAMS)
    words = [sys.executable, "-m", "kcap", "record", "-o", "out", "--", sys.executable, "program.py"]
    ran = subprocess.run(words, input="piped", cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "out: piped\n"), ran.stderr
    assert ran.stderr.startswith("err\nout: ")


class Terminal:
    """A terminal on which a program runs: what it shows is read, and keys are typed into it."""

    def __init__(self, words: list[str], directory: Path) -> None:
        self.seen = b""
        self._process, self._file = pty.fork()
        if not self._process:
            os.chdir(directory)
            os.execvp(words[0], words)

    def type(self, keys: bytes, after: bytes) -> None:
        """Type `keys` once `after` is shown, which is then forgotten."""
        deadline = time.monotonic() + 60
        while after not in self.seen:
            assert select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))[0], self.seen
            self.seen += os.read(self._file, 1000)
        self.seen = self.seen.partition(after)[2]
        os.write(self._file, keys)

    def end(self) -> int:
        """Read all that is shown to the end; the exit code."""
        try:
            while data := os.read(self._file, 1000):
                self.seen += data
        except OSError:  # nobody has it open any more
            os.close(self._file)
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(program)` records it on a terminal; with `shell` the line is typed into one."""

    def start(program: str, shell: bool = False) -> Terminal:
        (tmp_path / "program.py").write_text(STEP + program)
        words = [sys.executable, "-m", "kcap", "record", "-o", "out", "--", sys.executable, "program.py"]
        if not shell:
            return Terminal(words, tmp_path)
        terminal = Terminal(["env", "PS1=ready> ", "bash", "--norc", "--noediting", "-i"], tmp_path)
        terminal.type(" ".join(words).encode() + b"\n", after=b"ready> ")
        return terminal

    return start


def test_a_program_prompts_hides_a_password_and_opens_its_terminal(run: Run, tmp_path: Path) -> None:
    terminal = run(ASKS)
    terminal.type(b"Ann\n", after=b"name? ")
    terminal.type(b"hidden\n", after=b"secret? ")
    assert terminal.end() == 0, terminal.seen
    assert b"hello Ann 6" in terminal.seen and b"on the terminal" in terminal.seen
    assert b"hidden" not in terminal.seen
    assert kcap_package.load(tmp_path / "out").metadata.steps == {"decode": 2}


def test_kcap_draws_nothing_where_a_program_does(run: Run) -> None:
    terminal = run(DRAWS)
    assert terminal.end() == 0, terminal.seen
    drawn = "".join(f"\r{percent:3}%" for percent in range(0, 101, 10))
    assert terminal.seen.decode().startswith(f"{drawn}out: ")


def test_ctrl_c_is_the_programs_own_once_it_has_read_from_the_terminal(run: Run, tmp_path: Path) -> None:
    terminal = run("input('go? ')" + WAITS)
    terminal.type(b"\n", after=b"go? ")
    terminal.type(b"\x03", after=b"waits")
    assert terminal.end() == 9, terminal.seen
    assert kcap_package.load(tmp_path / "out").metadata.notes == ["the command ended with status 9"]


def test_ctrl_c_before_that_ends_the_recording_in_order(run: Run, tmp_path: Path) -> None:
    terminal = run(WAITS)
    terminal.type(b"\x03", after=b"waits")
    assert terminal.end() == 0, terminal.seen
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.complete, metadata.notes) == (True, [])


def test_ctrl_z_at_a_prompt_stops_and_fg_goes_on(run: Run) -> None:
    terminal = run(ASKS, shell=True)
    terminal.type(b"\x1a", after=b"name? ")
    terminal.type(b"fg\n", after=b"ready> ")
    terminal.type(b"Ann\n", after=b"program.py")  # the shell names the job that goes on
    terminal.type(b"hidden\n", after=b"secret? ")
    terminal.type(b"exit 4\n", after=b"ready> ")
    assert terminal.end() == 4, terminal.seen

"""Where a Recording comes to when it is whole: nothing else is replaced, and whatever comes between, it is kept."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcap as kcap_package
from kcap.capture.controller import output, run
from kcap.errors import CallError, KcapError

Kcap = Callable[..., Any]
STEPS = """
import sys, torch, kcap
from pathlib import Path
with torch.no_grad(), kcap.step("decode"):
    torch.mm(torch.eye(4), torch.eye(4))
"""
TO_THE_OUTPUT = "Path('out').mkdir(exist_ok=True); Path('out/results.csv').write_text('mine')"


@pytest.fixture
def record(kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`record(text, *options)` records a step, and then what the program's `text` does, into `out`."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> Any:
        Path("program.py").write_text(STEPS + text)
        return kcap("record", "-o", "out", *options, "--", sys.executable, "program.py")

    return run


@pytest.mark.parametrize(
    ("error", "path"),
    [(OSError(errno.ENOSPC, "full"), "out"), (OSError(errno.EPIPE, "pipe"), None), (OSError("no library"), None)],
)
def test_a_full_disk_is_the_outputs_where_the_error_names_none(
    error: OSError, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError) as raised, output.working_directory(Path("out"), False):
        raise error
    assert raised.value.filename == path


def test_a_working_directory_that_is_gone_is_named(record: Callable[..., Any]) -> None:
    ran = record("import shutil; shutil.rmtree(next(Path().glob('.out.*')))")
    assert ran.code == 1
    assert "where kcap was recording, was removed meanwhile" in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_what_came_to_be_at_the_output_meanwhile_is_not_replaced(
    options: tuple[str, ...], record: Callable[..., Any]
) -> None:
    ran = record(TO_THE_OUTPUT, *options)
    assert ran.code == 1
    assert "out changed while this was recorded, and is not replaced" in ran.err
    assert [path.name for path in Path("out").iterdir()] == ["results.csv"]
    (kept,) = Path().glob(".out.*")
    assert f"{kept}: move it to another place" in ran.err
    assert kcap_package.load(kept).metadata.steps == {"decode": 1}


def test_the_same_inside_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    what = r"out changed while this .*: the Recording is in .*/\.out\."
    with pytest.raises(KcapError, match=what) as error, kcap_package.record("out"):
        exec(TO_THE_OUTPUT)
    assert not isinstance(error.value, CallError)
    assert Path("out/results.csv").read_text() == "mine"


def test_a_symbolic_link_is_refused_before_anything_starts(record: Callable[..., Any], recording: Path) -> None:
    Path("out").symlink_to(recording)
    ran = record("Path('started').touch()", "--force")
    assert (ran.code, "out is a symbolic link" in ran.err) == (2, True)
    assert Path("out").is_symlink() and not Path("started").exists()
    with pytest.raises(CallError, match="symbolic link"), kcap_package.record("out", force=True):
        pass
    Path("out").unlink()
    Path("out").symlink_to("nowhere")
    assert record("").code == 2


def test_a_whole_recording_is_kept_whatever_comes_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), output.working_directory(tmp_path / "out", False) as beside:
        (beside.directory / "recording.json").touch()
        raise KeyboardInterrupt
    assert (beside.directory / "recording.json").is_file()
    assert f"the Recording is in {beside.directory}" in capsys.readouterr().err


def test_shards_go_once_the_recording_is_in_its_place(
    record: Callable[..., Any], kcap: Kcap, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(output, "publish", lambda directory, *_: (_ for _ in ()).throw(OSError(5, "a broken disk")))
        ran = record("")
    (left,) = Path().glob(".out.*")
    assert (ran.code, "a broken disk" in ran.err) == (1, True)
    assert kcap("recover", left, "-o", "out").code == 0
    assert kcap_package.load("out").metadata.steps == {"decode": 1}
    assert record("", "--force").code == 0
    assert not Path("out/shards").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_no_signal_keeps_a_recording_from_its_place(
    number: int, record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (os.kill(os.getpid(), number), work(*args), os.kill(os.getpid(), number))[1]

    monkeypatch.setattr(run, "fold_session", interrupted(run.fold_session))
    monkeypatch.setattr(output, "publish", interrupted(output.publish))
    ran = record("")
    assert ran.code == 0, ran.err
    assert kcap_package.load("out").metadata.complete
    assert list(Path().glob(".out.*")) == []

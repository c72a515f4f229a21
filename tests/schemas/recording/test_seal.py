"""Only what this user recorded on this machine holds its seal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kcap.errors import KcapError
from kcap.schemas.recording.seal import holds, key_path, make_key, read_key, seal

NAMES = ["b" * 64 + ".py", "a" * 64 + ".cpp"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_seal_holds_for_the_same_files_in_any_order() -> None:
    sealed = seal(NAMES)
    assert holds(sealed, reversed(NAMES))
    assert seal(iter(NAMES[::-1])) == sealed


@pytest.mark.parametrize("names", [[*NAMES, "c" * 64 + ".py"], NAMES[:1], [], ["".join(NAMES)]])
def test_a_file_more_or_less_breaks_the_seal(names: list[str]) -> None:
    assert not holds(seal(NAMES), names)


@pytest.mark.parametrize("sealed", [None, "", "0" * 64, "é" * 64])
def test_what_is_no_seal_does_not_hold(sealed: str | None) -> None:
    make_key()
    assert not holds(sealed, NAMES)
    assert not holds(sealed, [])


def test_another_users_seal_does_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = seal(NAMES)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    assert not holds(theirs, NAMES)
    assert not key_path().exists(), "asking makes no key"
    seal([])
    assert not holds(theirs, NAMES)


def test_the_key_is_for_its_user_alone(home: Path) -> None:
    seal(NAMES)
    assert key_path() == home / "kcap" / "key"
    assert len(key_path().read_bytes()) == 32
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_path().parent.iterdir()] == ["key"]


def test_a_key_that_others_can_read_or_that_is_cut_seals_nothing() -> None:
    sealed = seal(NAMES)
    key_path().chmod(0o644)
    assert read_key() is None
    assert not holds(sealed, NAMES)
    with pytest.raises(KcapError, match="remove it"):
        seal(NAMES)
    key_path().chmod(0o600)
    assert holds(sealed, NAMES)
    key_path().write_bytes(b"")
    assert not holds(sealed, NAMES)


def test_without_xdg_the_key_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert key_path() == tmp_path / ".local" / "share" / "kcap" / "key"


def test_processes_that_race_for_the_first_key_end_up_with_one(home: Path) -> None:
    code = "import sys; from kcap.schemas.recording.seal import seal as f; sys.stdin.read(); print(f(['x']))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    racers = [subprocess.Popen([sys.executable, "-c", code], text=True, env=os.environ, **pipes) for _ in range(6)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
        racer.stdin = None
    seals = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert seals == {seal(["x"])}


def test_a_key_made_in_between_is_taken_not_replaced() -> None:
    first = make_key()
    assert make_key() == first

"""kcap's own C++ where it cannot be compiled: that is said, and whoever asked for it goes on without."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest

from kcap.schemas.recording.seal import read_key, seal
from kcap.system import native_build
from kcap.system.worker_process import worker_environment


@pytest.mark.parametrize("script", ["exec sleep 60", '[ "$1" = --version ] || exec sleep 60'])
def test_a_compiler_that_does_not_end_is_none(tmp_path, monkeypatch, script):
    compiler, source = tmp_path / "hangs", tmp_path / "source.cpp"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    source.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "LIMIT_S", 0.2)
    with pytest.raises(native_build.Unavailable, match=r"hangs does not end within 0\.2 s"):
        native_build.build([source])


@pytest.fixture
def one(tmp_path, monkeypatch):
    """The source of a small library; the cache is a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }')
    return tmp_path / "one.cpp"


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 0\n", "#!/nowhere/sh\n"])
def test_a_compiler_that_makes_nothing_is_none(one, tmp_path, monkeypatch, script):
    (tmp_path / "c++").write_text(script)
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(native_build.Unavailable, match=r"^one\.cpp cannot be compiled: "):
        native_build.build([one])


def test_a_folder_in_a_librarys_place_is_told(one):
    built = native_build.build([one])
    built.unlink()
    built.mkdir()
    with pytest.raises(native_build.Unavailable, match="directory"):
        native_build.build([one])
    assert list(built.parent.iterdir()) == [built]


def test_a_damaged_library_is_built_again(one):
    built = native_build.build([one])
    assert native_build.build([one]) == built
    with built.open("r+b") as file:
        file.truncate(built.stat().st_size // 2)
    assert ctypes.CDLL(str(native_build.build([one]))).one() == 1


def test_a_library_that_was_built_before_needs_no_compiler(one, tmp_path, monkeypatch):
    built = native_build.build([one])
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_build.build([one]) == built
    one.write_text('extern "C" int one() { return 2; }')
    with pytest.raises(native_build.Unavailable, match=r"no C\+\+ compiler"):
        native_build.build([one])


@pytest.fixture
def read_only_home(tmp_path, monkeypatch):
    """A home that nobody may write to, and a temporary folder of its own; gives that."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "home" not in str(path) and access(path, mode))  # root may all
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_read_only_home_is_replaced_by_a_temporary_folder_of_the_users_own(read_only_home):
    folder = native_build.cache_folder()
    assert folder.parent == read_only_home
    assert folder.stat().st_mode & 0o777 == 0o700
    assert native_build.cache_folder() == folder, "the same one next time"


@pytest.mark.parametrize("home", ["/proc/nothere", "relative"])
def test_a_home_that_is_not_there_is_no_error(home, read_only_home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert native_build.cache_folder().parent == read_only_home
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    assert worker_environment()["TRITON_HOME"] == str(native_build.cache_folder())
    with pytest.raises(OSError):
        seal(["kernel.py"])
    assert read_key() is None


def test_what_triton_compiles_is_left_to_a_home_that_can_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_HOME", raising=False)
    assert "TRITON_HOME" not in worker_environment()


@pytest.mark.parametrize("plant", ["open to others", "link"])
def test_a_temporary_folder_that_others_can_write_to_is_never_loaded_from(read_only_home, plant):
    name = read_only_home / f"kcap-{os.getuid()}"
    if plant == "link":
        (read_only_home / "elsewhere").mkdir()
        name.symlink_to(read_only_home / "elsewhere")
    else:
        name.mkdir()
        name.chmod(0o777)
    with pytest.raises(native_build.Unavailable, match="set XDG_CACHE_HOME"):
        native_build.cache_folder()

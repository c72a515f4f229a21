"""What any command may write over: nothing without --force, and with it only what kcap made, or an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcap.errors import CallError
from kcap.system.output import OutputKind, atomic_directory, check_files, check_output, write_atomically

KIND = OutputKind(("mark.json",), "not of this kind: choose another -o")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_an_empty_directory_is_replaced_by_force_alone(output: Path) -> None:
    with pytest.raises(CallError, match="already exists: pass --yes to replace it"):
        check_output(output, False, "--yes", KIND)
    check_output(output, True, "--yes", KIND)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_of_another_kind_is_never_replaced(output: Path, force: bool) -> None:
    (output / "thesis.txt").write_text("years")
    for path in (output, output / "thesis.txt"):
        with pytest.raises(CallError, match="not of this kind"):
            check_output(path, force, kind=KIND)
    (output / "mark.json").write_text("{}")
    if force:
        check_output(output, force, kind=KIND)


def test_a_symbolic_link_is_no_output(output: Path) -> None:
    (output.parent / "link").symlink_to(output)
    with pytest.raises(CallError, match="symbolic link"):
        check_output(output.parent / "link", True, kind=KIND)


def test_an_output_and_what_is_read_for_it_lie_apart(output: Path) -> None:
    (output / "mark.json").write_text("{}")
    for source in (output, output / "inside", output.parent):
        with pytest.raises(CallError, match="which is read: choose another -o"):
            check_output(output, True, kind=KIND, sources=[source])
    check_output(output, True, kind=KIND, enclosing=[output.parent])
    with pytest.raises(CallError, match="is or holds"):
        check_output(output, True, kind=KIND, enclosing=[output / "inside"])


def test_files_are_not_written_over_what_is_read(output: Path) -> None:
    file = output / "m.jsonl"
    check_files(file, False, [output])
    file.touch()
    with pytest.raises(CallError, match="already exists: pass --force"):
        check_files(file, False, [])
    check_files(file, True, [output / "other"])
    for source in (file, output):
        with pytest.raises(CallError, match="which is read: choose another -o"):
            check_files(file, True, [source])
    with pytest.raises(CallError, match="is no directory"):
        check_files(file, True, [], folder=True)
    with pytest.raises(CallError, match="is a directory"):
        check_files(output, True, [])


def test_what_fails_leaves_what_was_there(output: Path) -> None:
    (output / "mark.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt), atomic_directory(output) as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert [path.name for path in output.parent.rglob("*")] == ["out", "mark.json"]
    write_atomically(output / "mark.json", b"[]")
    assert [path.read_bytes() for path in output.iterdir()] == [b"[]"]

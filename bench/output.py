"""The folder that `kcap bench` writes: made, replaced or resumed, and written by one run at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kcap.bench.results import run as runs
from kcap.errors import CallError


def check_output(output: Path, sources: Sequence[Path], resume: bool, force: bool) -> None:
    """CallError if `output` cannot be written as asked, or holds one of `sources` or lies in one."""
    if resume and force:
        raise CallError("--resume keeps what is there and --force replaces it: pass one of them")
    for source in sources:
        _check_apart(output.resolve(), source.resolve(), source)
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise CallError(f"{output}: not a folder: choose another -o")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / runs.FILE).is_file():
        raise CallError(f"{output}: not made by kcap bench, and so neither replaced nor resumed: choose another -o")
    if not resume and not force:
        raise CallError(f"{output}: already exists: pass --resume to finish it, or --force to replace it")


def _check_apart(output: Path, source: Path, name: Path) -> None:
    if source.is_relative_to(output):
        raise CallError(f"{output}: holds {name}: choose another -o")
    if output.is_relative_to(source) and (source / "recording.json").exists():
        raise CallError(f"{output}: lies in {name}: choose another -o")


@contextmanager
def owned(output: Path, force: bool) -> Iterator[None]:
    """`output` is there, with `force` empty, and no other run writes it; CallError if one does."""
    output.mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, output)
        if force:
            _empty(output)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CallError(f"{output}: another kcap bench writes it: wait for it, or choose another -o") from None


def _empty(output: Path) -> None:
    """bench.json, which says whose the folder is, goes last."""
    for path in sorted(output.iterdir(), key=lambda one: one.name == runs.FILE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

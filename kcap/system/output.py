"""Where output goes: what may be replaced, and directories that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kcap.errors import CallError, KcapError


@contextmanager
def atomic_directory(output: Path, private: bool = False) -> Iterator[Path]:
    """A folder beside `output` that takes its place at the end, or goes if something fails.

    `private`: for its owner alone (mode 0700), as a Recording is.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield folder
        if output.exists():
            shutil.rmtree(output)
        if not private:
            folder.chmod(0o777 & ~_umask())
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_output(output: Path, force: bool, option: str) -> None:
    """CallError where `output` exists, unless `force` lets it be replaced and it is a Recording (or empty)."""
    if output.is_symlink():
        raise CallError(f"{output} is a symbolic link: give the directory itself, or another output")
    if not output.exists():
        return
    if not force:
        raise CallError(f"{output} already exists: pass {option} to replace it")
    is_recording = (output / "recording.json").is_file()
    if not is_recording and (not output.is_dir() or any(output.iterdir())):
        raise CallError(f"{output} is no Recording: kcap does not replace it")


def publish(directory: Path, output: Path, force: bool) -> None:
    """Move a Recording from `directory` to `output`, and remove its shards. KcapError if `output` is in the way now."""
    try:
        check_output(output, force, "")
    except CallError:
        raise KcapError(f"{output} changed while this was recorded, and is not replaced") from None
    if output.exists():
        shutil.rmtree(output)
    directory.rename(output)
    shutil.rmtree(output / "shards", ignore_errors=True)


def describe_leftover(directory: Path, output: Path) -> str:
    """What a `directory` whose Recording has not come to `output` holds, and what makes it one; "" if nothing."""
    if (directory / "recording.json").is_file():
        return f"the Recording is in {directory}: move it to another place"
    if any(directory.glob("shards/*.jsonl")):
        return f"what was recorded is in {directory}: kcap recover {directory} -o {output}"
    return ""

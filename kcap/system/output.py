"""Where output goes: what may be replaced, and files and directories that are there whole or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kcap.errors import CallError, KcapError


@dataclass(frozen=True)
class OutputKind:
    """A kind of directory, told by one of the `markers` in it. `refusal`: what is said of any other."""

    markers: tuple[str, ...]
    refusal: str


RECORDING = OutputKind(("recording.json",), "no Recording, and is not replaced: choose another output")


def check_output(
    output: Path,
    force: bool,
    option: str = "--force",
    kind: OutputKind = RECORDING,
    sources: Iterable[Path] = (),
    enclosing: Iterable[Path] = (),
) -> None:
    """CallError unless `output` is free, or is of `kind` (or empty) and may be replaced (`force`, said by `option`).

    `sources` are read: they may neither lie in `output` nor hold it. Those in `enclosing` may hold it.
    """
    if output.is_symlink():
        raise CallError(f"{output} is a symbolic link: give the directory itself, or another output")
    if output.exists():
        is_kind = any((output / name).exists() for name in kind.markers)
        if not is_kind and (not output.is_dir() or any(output.iterdir())):
            raise CallError(f"{output} is {kind.refusal}")
        if not force:
            raise CallError(f"{output}: already exists: pass {option} to replace it")
    sources = list(sources)
    for source in (*sources, *enclosing):
        if source.resolve().is_relative_to(output.resolve()):
            raise CallError(f"{output}: is or holds {source}, which is read: choose another -o")
    _check_outside(output, sources)


def check_files(output: Path, force: bool, sources: Iterable[Path], folder: bool = False) -> None:
    """CallError unless the file `output`, or those in the `folder` of that name, are free or may be overwritten.

    `sources` are read, and nothing in them is overwritten.
    """
    if not output.exists():
        return
    if output.is_dir() is not folder:
        raise CallError(f"{output} is {'no ' if folder else 'a '}directory: choose another -o")
    if not force:
        raise CallError(f"{output}: already exists: pass --force")
    _check_outside(output, sources)


def _check_outside(output: Path, sources: Iterable[Path]) -> None:
    for source in sources:
        if output.resolve().is_relative_to(source.resolve()):
            raise CallError(f"{output}: is or lies in {source}, which is read: choose another -o")


def make_directory_beside(output: Path) -> Path:
    """A new directory on the disk of `output`, for its owner alone (mode 0700), to be moved there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CallError(f"{output.parent} is, or lies below, what is no directory: choose another -o") from None
    return Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))


def _move(directory: Path, output: Path) -> None:
    directory.stat()  # FileNotFoundError before anything is lost
    if output.exists():
        shutil.rmtree(output)
    directory.rename(output)


@contextmanager
def atomic_directory(output: Path, private: bool = False) -> Iterator[Path]:
    """A directory beside `output` that takes its place at the end, or goes if something fails.

    `private`: for its owner alone (mode 0700), as a Recording is.
    """
    directory = make_directory_beside(output)
    try:
        yield directory
        if not private:
            directory.chmod(0o777 & ~_umask())
        _move(directory, output)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file with `content` in place at once."""
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.replace(path)


def publish(directory: Path, output: Path, force: bool) -> None:
    """Move a Recording from `directory` to `output`, and remove its shards. KcapError if `output` is in the way now."""
    try:
        check_output(output, force)
    except CallError:
        raise KcapError(f"{output} changed while this was recorded, and is not replaced") from None
    _move(directory, output)
    shutil.rmtree(output / "shards", ignore_errors=True)


def describe_leftover(directory: Path, output: Path) -> str:
    """What a `directory` whose Recording has not come to `output` holds, and what makes it one; "" if nothing."""
    if (directory / "recording.json").is_file():
        return f"the Recording is in {directory}: move it to another place"
    if any(directory.glob("shards/*.jsonl")):
        return f"what was recorded is in {directory}: {recover_command(directory, output)}"
    return ""


def recover_command(directory: Path, output: Path) -> str:
    """What makes a Recording of the shards in `directory`, for a shell."""
    return shlex.join(["kcap", "recover", str(directory), "-o", str(output)])

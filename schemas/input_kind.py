"""Which kind of input a path is, decided here for every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kcap.errors import CallError

if TYPE_CHECKING:
    from kcap.schemas.backendbench import Problems, TraceLine

Kind = Literal["recording", "dataset", "parquet", "trace"]


def detect_input(path: Path) -> Kind:
    """A Recording, a FlashInfer-Bench dataset, a BackendBench parquet or trace file; CallError if nothing is there.

    A directory that is no dataset is taken for a Recording, and any other file for a trace file: their readers say
    what is wrong.
    """
    if not path.exists():
        raise CallError(f"{path}: no such Recording, dataset or trace file (kcap record writes a Recording)")
    if path.is_dir():
        dataset = (path / "definitions").is_dir() and not (path / "recording.json").exists()
        return "dataset" if dataset else "recording"
    return "parquet" if path.suffix == ".parquet" or _is_parquet(path) else "trace"


def _is_parquet(path: Path) -> bool:
    from kcap.schemas.backendbench.table import MAGIC

    if not path.is_file():  # a pipe can be read once only
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def trace_lines(path: Path, problems: Problems | None = None) -> Iterator[TraceLine]:
    """The lines of a BackendBench trace file or parquet, as a stream; FormatError at the first bad one, or with
    `problems` they are counted in it."""
    if detect_input(path) == "parquet":
        from kcap.schemas.backendbench.table import read_table

        return read_table(path, problems)
    from kcap.schemas.backendbench import read

    return read(path, problems=problems)

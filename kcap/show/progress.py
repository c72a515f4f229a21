"""Where a replay's measurements go, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def opened(output: Path | None) -> Iterator[BinaryIO | None]:
    """The output file, written line by line so that an interrupted replay keeps what it measured."""
    if output is None:
        yield None
        return
    with output.open("wb", buffering=0) as file:
        yield file


def progress() -> Progress:
    """A bar on standard error, gone when it is done."""
    columns = (
        TextColumn("{task.description:<40}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)

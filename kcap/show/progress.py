"""Where a replay's measurements go, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between two lines, where there is no terminal


@contextmanager
def opened(output: Path | None) -> Iterator[BinaryIO | None]:
    """The output file, written line by line so that an interrupted replay keeps what it measured."""
    if output is None:
        yield None
        return
    with output.open("wb", buffering=0) as file:
        yield file


class Bar(Progress):
    """On a terminal a bar, elsewhere a line now and then."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._told = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if not self.console.is_terminal and time.monotonic() > self._told + EVERY:
            self._told = time.monotonic()
            task = next(task for task in self.tasks if task.id == task_id)
            of = "" if task.total is None else f" of {task.total:,.0f}"
            click.echo(f"kcap: {task.completed:,.0f}{of} done, {task.description.strip()}", err=True)


def progress() -> Progress:
    """A bar on standard error, gone when it is done."""
    columns = (
        TextColumn("{task.description:<40}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(stderr=True), transient=True)

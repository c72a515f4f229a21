"""The steps that the processes of a `kcap record` under way have ended, as their shards count them."""

from __future__ import annotations

from pathlib import Path

from kcap.capture.shards.counts import STEPS, Counts


def steps_by_process(directory: Path) -> dict[int, int]:
    """By process, of the recording whose output is `directory`/out."""
    files = directory.glob(".out.*/shards/*.counts")
    return {int(file.stem.rpartition("-")[2]): _steps(file) for file in files}


def _steps(counts: Path) -> int:
    try:
        return Counts(counts).cells[STEPS]
    except ValueError:  # it is just being made
        return 0

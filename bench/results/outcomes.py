"""outcomes.jsonl: each Outcome a line, written when it is there, so that what a kill leaves can be finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kcap.schemas import outcome as outcomes_file
from kcap.schemas.outcome import Outcome

FILE = "outcomes.jsonl"
Key: TypeAlias = tuple[str, str, str]  # definition, author, solution


@dataclass(frozen=True)
class Kept:
    """What an output holds already. `torn`: its last line broke off, and is gone."""

    outcomes: list[Outcome]
    torn: bool = False


def key(outcome: Outcome) -> Key:
    """Whose Outcome it is."""
    return outcome.definition, outcome.author, outcome.solution


def keep(output: Path, valid: Callable[[Outcome], bool]) -> Kept:
    """The Outcomes in `output` that are `valid`, the last of each Workload; the others are removed from the file.

    FormatError for a line that is no Outcome, unless it is the last and broke off.
    """
    path = output / FILE
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        _replace(path, whole)
    read = list(outcomes_file.read(path)) if whole else []
    latest = {(*key(one), one.workload): one for one in read if valid(one)}
    if len(latest) != len(read):
        _replace(path, b"".join(one.line() for one in latest.values()))
    return Kept(list(latest.values()), whole != content)


@contextmanager
def opened(output: Path) -> Iterator[Callable[[Outcome], object]]:
    """A function that adds an Outcome to the file, in one write."""
    with (output / FILE).open("ab", buffering=0) as file:
        yield lambda outcome: file.write(outcome.line())


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    os.replace(beside, path)

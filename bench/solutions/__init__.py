"""The Solutions of a folder, whatever form each is written in: one file per form, registered in `forms`.

Nothing of a Solution is run here. What cannot be read, or answers no Definition, is refused by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kcap.bench.solutions.contents import text_of
from kcap.bench.solutions.entry import check_entry
from kcap.bench.solutions.forms import Given, form_of, known, suffixes
from kcap.errors import CallError, FormatError
from kcap.schemas.definition import Definition
from kcap.schemas.solution import Solution

NO_SOLUTION = "{}: has no Solution: put *.json of FlashInfer-Bench's form there, or *.py files that define run"


@dataclass(frozen=True)
class Found:
    """A Solution and the file that it was read from."""

    file: Path
    solution: Solution


@dataclass(frozen=True)
class Refused:
    """A file that gives no Solution, the reason in a line, and as far as they can be told its name and Definition."""

    file: Path
    reason: str
    name: str
    definition: str | None


def read_solutions(
    folder: Path, definitions: Mapping[str, Definition], default: str | None
) -> tuple[list[Found], list[Refused]]:
    """The Solutions in `folder`, at any depth, and what was refused, both in the order of their paths.

    `default`: the Definition of a plain Python file that names none. Of a dataset, its `solutions/` is read. Hidden
    folders and caches are left out. CallError if there is no such folder, or no file that could be a Solution.
    """
    found: list[Found] = []
    refused: list[Refused] = []
    taken: dict[tuple[str, str], Path] = {}
    for file in _candidates(folder):
        one = _first_of_its_name(_read(file, folder, definitions, default), taken)
        if isinstance(one, Found):
            found.append(one)
        else:
            refused.append(one)
    return found, refused


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CallError(f"{folder}: no such folder: name the one that the Solutions are in")
    if (folder / "definitions").is_dir() and (folder / "solutions").is_dir():
        folder = folder / "solutions"
    candidates = sorted(_walk(folder), key=os.fspath)
    if not candidates:
        raise CallError(NO_SOLUTION.format(folder))
    return candidates


def _walk(folder: Path) -> Iterator[Path]:
    """Files that a form's suffix ends, and links to folders, which are not followed."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        named = [name for name in files if Path(name).suffix in suffixes() and not name.startswith(".")]
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        yield from (Path(parent) / name for name in named + linked)


def _read(file: Path, folder: Path, definitions: Mapping[str, Definition], default: str | None) -> Found | Refused:
    name, definition = file.stem, None
    try:
        given = Given(file.name, text_of(file, folder), definitions, default)
        form = form_of(given)
        name, definition = form.name(given), form.definition(given)
        solution = form.read(given)
        known(given, solution.definition)
        check_entry(solution, file.name)
    except FormatError as error:
        return Refused(file, str(error), name, definition)
    return Found(file, solution)


def _first_of_its_name(one: Found | Refused, taken: dict[tuple[str, str], Path]) -> Found | Refused:
    """`one`, refused if its Definition has a Solution of its name already: `taken` says in which file."""
    if isinstance(one, Refused):
        return one
    name, definition = one.solution.name, one.solution.definition
    first = taken.setdefault((name, definition), one.file)
    if first == one.file:
        return one
    reason = f"{one.file.name}: {definition} has a Solution {name} already, in {first}: rename one"
    return Refused(one.file, reason, name, definition)

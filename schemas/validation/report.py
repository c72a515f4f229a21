"""What is wrong with a path: every problem of it, errors and warnings, with its place and reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.backendbench import Problems
from kcap.schemas.files.jsonfile import examine, numbered_lines

T = TypeVar("T")


def printable(text: str) -> str:
    """`text` in one line, with escapes for what is not to be shown: control characters, parts of a character."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


@dataclass(frozen=True)
class Problem:
    """`place`: `path`, `path:line` or `path:line:column`. A warning leaves the path valid.

    Both texts can come from the file, so what a terminal would obey is in them as escapes.
    """

    place: str
    reason: str
    warning: bool = False

    @classmethod
    def of(cls, place: object, reason: str, warning: bool = False) -> Problem:
        return cls(printable(str(place)), printable(reason), warning)

    def __str__(self) -> str:
        return f"{self.place}: {'warning: ' if self.warning else ''}{self.reason}"


@dataclass
class Report:
    """The problems found so far."""

    problems: list[Problem] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return all(problem.warning for problem in self.problems)

    def error(self, place: Any, *reasons: str) -> None:
        self.problems.extend(Problem.of(place, reason) for reason in reasons)

    def warn(self, place: Any, *reasons: str) -> None:
        self.problems.extend(Problem.of(place, reason, warning=True) for reason in reasons)

    def add(self, *errors: FormatError) -> None:
        self.problems.extend(Problem.of(error.place, error.reason) for error in errors)

    def document(self, path: Path, adapter: TypeAdapter[T]) -> T | None:
        """The document in `path`, or None where it is wrong."""
        try:
            documents, errors = examine(path.read_bytes(), adapter, str(path))
        except OSError as error:
            self.error(path, f"cannot be read: {error.strerror}")
            return None
        self.add(*errors)
        return documents[0] if documents else None

    def lines(self, path: Path, adapter: TypeAdapter[T]) -> Iterator[tuple[str, T]]:
        """The documents in `path`, one a line, each with its place; lines that are wrong are left out."""
        yield from ((place, document) for place, found in self.every_line(path, adapter) for document in found)

    def every_line(self, path: Path, adapter: TypeAdapter[T]) -> Iterator[tuple[str, list[T]]]:
        """Of each line of `path` its place and its document; none of a line that is wrong."""
        try:
            for number, line in numbered_lines(path):
                documents, errors = examine(line, adapter, str(path), number)
                self.add(*errors)
                yield f"{path}:{number}", documents
        except OSError as error:
            self.error(path, f"cannot be read: {error.strerror}")

    def skipped(self, path: Path, problems: Problems) -> None:
        """The lines of a trace file or table that its reader skipped."""
        self.add(*problems.first)
        if more := problems.lines - len(problems.first):
            self.error(path, f"{more} more lines are wrong, too")

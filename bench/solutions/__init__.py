"""The Solutions of a folder, whatever form each is written in: one file a form, its Form registered by its suffix.

Nothing of a Solution is run here: it is read (bounded, from inside the folder that was named) and looked at. A file
that cannot be read, or answers no Definition, is refused by itself.
"""

from __future__ import annotations

import ast
import difflib
import os
import stat
import symtable
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import orjson
from pydantic import ValidationError

from kcap.errors import CallError, FormatError
from kcap.schemas.files.jsonfile import reasons
from kcap.schemas.files.python_source import parse
from kcap.schemas.flashinfer.definition import Definition
from kcap.schemas.flashinfer.solution import Solution
from kcap.system.registry import import_plugins

NO_SOLUTION = "{}: has no Solution: put *.json of FlashInfer-Bench's form there, or *.py files that define run"


@dataclass(frozen=True)
class FoundSolution:
    """A Solution and the file that it was read from."""

    file: Path
    solution: Solution


@dataclass(frozen=True)
class RefusedSolution:
    """A file that gives no Solution, the reason in a line, and as far as they can be told its name and Definition."""

    file: Path
    reason: str
    name: str
    definition: str | None


def read_solutions(
    folder: Path, definitions: Mapping[str, Definition], default: str | None
) -> tuple[list[FoundSolution], list[RefusedSolution]]:
    """The Solutions in `folder`, at any depth, and what was refused, both in the order of their paths.

    `default`: the Definition of a plain Python file that names none. Of a dataset, its `solutions/` is read. Hidden
    folders and caches are left out. CallError if there is no such folder, or no file that could be a Solution.
    """
    solutions: list[FoundSolution] = []
    refused: list[RefusedSolution] = []
    taken: dict[tuple[str, str], Path] = {}
    for file in _files(folder):
        result = _first_of_its_name(read_solution(file, folder, definitions, default), taken)
        if isinstance(result, FoundSolution):
            solutions.append(result)
        else:
            refused.append(result)
    return solutions, refused


def _files(folder: Path) -> list[Path]:
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


def read_solution(
    file: Path, folder: Path, definitions: Mapping[str, Definition], default: str | None
) -> FoundSolution | RefusedSolution:
    """The Solution in `file`, which lies in `folder`; `default` as for `read_solutions`."""
    name, definition = file.stem, None
    try:
        solution_text = SolutionText(file.name, read_text(file, folder), definitions, default)
        form = form_of(solution_text)
        name, definition = form.name(solution_text), form.definition(solution_text)
        solution = form.read(solution_text)
        find_definition(solution_text, solution.definition)
        check_entry(solution, file.name)
    except FormatError as error:
        return RefusedSolution(file, str(error), name, definition)
    return FoundSolution(file, solution)


def _first_of_its_name(
    result: FoundSolution | RefusedSolution, taken: dict[tuple[str, str], Path]
) -> FoundSolution | RefusedSolution:
    """`result`, refused if its Definition has a Solution of its name already: `taken` says in which file."""
    if isinstance(result, RefusedSolution):
        return result
    name, definition = result.solution.name, result.solution.definition
    first = taken.setdefault((name, definition), result.file)
    if first == result.file:
        return result
    reason = f"{result.file.name}: {definition} has a Solution {name} already, in {first}: rename one"
    return RefusedSolution(result.file, reason, name, definition)


FORMS: list[tuple[str, Form]] = []


@dataclass(frozen=True)
class SolutionText:
    """A file's name and text, the Definitions that there are by name, and the one of a file that names none."""

    file: str
    text: str
    definitions: Mapping[str, Definition]
    default: str | None

    @property
    def stem(self) -> str:
        return PurePath(self.file).stem

    @cached_property
    def document(self) -> dict[str, Any]:
        """The JSON object that the text is; {} if it is none."""
        try:
            document = orjson.loads(self.text)
        except ValueError:  # what of it is no JSON, or no Unicode
            return {}
        return document if isinstance(document, dict) else {}

    def word(self, key: str) -> str | None:
        """The string that the JSON object has under `key`, if it has one."""
        return value if isinstance(value := self.document.get(key), str) else None


class Form:
    """Reads files of one form. `name` and `definition` are what is told when `read` refuses: they never raise."""

    def claims(self, solution_text: SolutionText) -> bool:
        """Whether a file of this form's suffix is of this form: of one suffix, exactly one form is."""
        return True

    def name(self, solution_text: SolutionText) -> str:
        return solution_text.stem

    def definition(self, solution_text: SolutionText) -> str | None:
        raise NotImplementedError

    def read(self, solution_text: SolutionText) -> Solution:
        """The Solution; FormatError with the reason if there is none."""
        raise NotImplementedError


def form(suffix: str) -> Callable[[type[Form]], type[Form]]:
    """Register a Form for files that end in `suffix`."""

    def register(kind: type[Form]) -> type[Form]:
        FORMS.append((suffix, kind()))
        return kind

    return register


def suffixes() -> frozenset[str]:
    """What ends the name of a file that may be a Solution."""
    import_plugins(__name__)
    return frozenset(suffix for suffix, _ in FORMS)


def form_of(solution_text: SolutionText) -> Form:
    """The Form of a file; FormatError where its suffix is not among `suffixes`."""
    endings = sorted(suffixes())
    for suffix, form in FORMS:
        if solution_text.file.endswith(suffix) and form.claims(solution_text):
            return form
    raise FormatError(solution_text.file, f"no Solution: the name of one ends in {' or '.join(endings)}")


def find_definition(solution_text: SolutionText, name: str) -> Definition:
    """The Definition `name`; FormatError with names that are near if there is none."""
    if definition := solution_text.definitions.get(name):
        return definition
    near = difflib.get_close_matches(name, solution_text.definitions, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "kcap show lists those that there are"
    raise FormatError(solution_text.file, f"there is no Definition {name!r}: {hint}")


def validated_solution(solution_text: SolutionText, document: Mapping[str, Any]) -> Solution:
    """The Solution that `document` is; FormatError with the first thing that is wrong."""
    try:
        return Solution.model_validate(document)
    except ValidationError as error:
        raise FormatError(solution_text.file, reasons(error, document)[0]) from None


MAX_BYTES = 16 << 20


def read_text(file: Path, folder: Path) -> str:
    """What `file` holds, without a byte order mark; FormatError if it cannot be read, or should not be."""
    try:
        return _read_bytes(file, folder).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(file.name, f"not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise FormatError(file.name, f"not readable ({getattr(error, 'strerror', None) or error})") from None


def _read_bytes(file: Path, folder: Path) -> bytes:
    if not file.resolve(strict=True).is_relative_to(folder.resolve()):
        raise FormatError(file.name, "a link that leads out of the folder: copy what it leads to")
    mode, size = (status := file.stat()).st_mode, status.st_size
    if stat.S_ISDIR(mode):
        raise FormatError(file.name, "a link to a folder, which is not followed")
    if not stat.S_ISREG(mode):
        raise FormatError(file.name, "no regular file")
    if size > MAX_BYTES:
        raise FormatError(file.name, f"larger than {MAX_BYTES >> 20} MiB")
    return file.read_bytes()


IN_PYTHON = frozenset({"python", "triton", "tilelang"})


def check_entry(solution: Solution, file_name: str) -> None:
    """FormatError if a Python source cannot have the entry point; what a compiler makes is for the build to say."""
    if solution.spec.language not in IN_PYTHON:
        return
    file, name = solution.spec.entry_file, solution.spec.entry_function
    if not file.endswith(".py"):
        raise FormatError(
            file_name, f"spec.entry_point: {file} is no .py file, but the language is {solution.spec.language}"
        )
    source = next(source.content for source in solution.sources if source.path == file)
    try:
        bound = may_bind(source, name)
    except ValueError as error:
        raise FormatError(file_name, f"{file}: {error}") from None
    if not bound:
        raise FormatError(file_name, f"spec.entry_point: {file} defines no {name}")


def may_bind(source: str, name: str) -> bool:
    """Whether the top level of `source` may bind `name`: as a function or otherwise. ValueError if it is no Python."""
    tree = parse(source)
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symbol = symtable.symtable(source, "<source>", "exec").lookup(name)
    except KeyError:
        return False
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no valid Python: {error}") from None
    return symbol.is_assigned() or symbol.is_imported()

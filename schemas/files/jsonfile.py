"""Read and write one JSON document that a pydantic model describes; read a file of one such document a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from kcap.errors import FormatError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
NOISE = re.compile(r"^Value error, | or instance of \w+$")  # pydantic's words for Python's side of things


def reasons(error: ValidationError, document: Any) -> list[str]:
    """What pydantic found wrong in `document`, each with the path of keys to it."""
    messages = [(_path(item["loc"], document), NOISE.sub("", item["msg"])) for item in error.errors()]
    return [f"{place}: {message}" if place else message for place, message in messages]


def _path(location: Sequence[int | str], document: Any) -> str:
    """`location` without the tags of unions, which are no keys of `document`."""
    path = []
    for part in location:
        inside = isinstance(document, list) if isinstance(part, int) else isinstance(document, dict)
        if inside and (isinstance(part, int) or part in document):
            document = document[part]  # type: ignore[index]
            path.append(str(part))
        elif inside and part == location[-1]:
            path.append(str(part))  # a key that is missing
    return ".".join(path)


def examine(
    content: bytes, adapter: TypeAdapter[T], place: str, line: int | None = None
) -> tuple[list[T], list[FormatError]]:
    """The one document in `content`, or none and all that is wrong: at a line and column of `place`, or in a field.

    `line`: the number of the content's line in `place`, if it is one line of a file.
    """
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        return [], [FormatError(f"{place}:{line or error.lineno}:{error.colno}", error.msg)]
    if line is None and (key := _repeated_key(content)) is not None:
        return [], [FormatError(place, f"{key}: is there twice in one object")]
    try:
        return [adapter.validate_python(document)], []
    except ValidationError as error:
        where = f"{place}:{line}" if line else place
        return [], [FormatError(where, reason) for reason in reasons(error, document)]


def _repeated_key(content: bytes) -> str | None:
    """A key that an object in `content` has twice: a reader would take the last, and drop the others unseen."""
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for key, value in pairs:
            if key in keys:
                repeated.append(key)
            keys[key] = value
        return keys

    with suppress(RecursionError):  # orjson takes some levels more
        json.loads(content, object_pairs_hook=note)
    return repeated[0] if repeated else None


def parse_json(content: bytes, adapter: TypeAdapter[T], place: str, line: int | None = None) -> T:
    """The document in `content`; FormatError with the first error that `examine` finds."""
    documents, errors = examine(content, adapter, place, line)
    if errors:
        raise errors[0]
    return documents[0]


def read_json(path: Path, adapter: TypeAdapter[T]) -> T:
    """The document in `path`; FormatError as for `parse_json`."""
    return parse_json(path.read_bytes(), adapter, str(path))


def dump_json(document: Any) -> bytes:
    """`document` with its keys in the order given, indented, ended by a line break."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` as `dump_json` has it."""
    path.write_bytes(dump_json(document))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of `path` that are not empty, numbered from 1."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def read_lines(path: Path, model: type[M]) -> Iterator[M]:
    """One `model` a line, empty lines aside; FormatError names the line that is none, and where the JSON breaks off."""
    adapter = TypeAdapter(model)
    for number, line in numbered_lines(path):
        yield parse_json(line, adapter, str(path), number)

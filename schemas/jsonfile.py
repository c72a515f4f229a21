"""Read and write one JSON document that a pydantic model describes; read a file of one such document a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from kcap.errors import FormatError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def reasons(error: ValidationError) -> list[str]:
    """What pydantic found wrong, each with the path of keys to it."""
    found = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return [f"{place}: {message}" if place else message for place, message in found]


def parse_json(content: bytes, adapter: TypeAdapter[T], place: str) -> T:
    """The document in `content`; FormatError names the line and column in `place`, or the field, that is wrong."""
    try:
        return adapter.validate_python(orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{place}:{error.lineno}:{error.colno}", error.msg) from None
    except ValidationError as error:
        raise FormatError(place, reasons(error)[0]) from None


def read_json(path: Path, adapter: TypeAdapter[T]) -> T:
    """The document in `path`; FormatError as for `parse_json`."""
    return parse_json(path.read_bytes(), adapter, str(path))


def dump_json(document: dict[str, Any]) -> bytes:
    """`document` with its keys in the order given, indented, ended by a line break."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` as `dump_json` has it."""
    path.write_bytes(dump_json(document))


def read_lines(path: Path, model: type[M]) -> Iterator[M]:
    """One `model` a line; FormatError names the line that is none, and where in it the JSON breaks off."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield model.model_validate(orjson.loads(line))
            except ValidationError as error:
                raise FormatError(f"{path}:{number}", reasons(error)[0]) from None
            except orjson.JSONDecodeError as error:
                raise FormatError(f"{path}:{number}:{error.colno}", error.msg) from None

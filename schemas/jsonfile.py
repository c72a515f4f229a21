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


def read_json(path: Path, adapter: TypeAdapter[T]) -> T:
    """The document in `path`; FormatError names the line and column, or the field, that is wrong."""
    try:
        return adapter.validate_python(orjson.loads(path.read_bytes()))
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{path}:{error.lineno}:{error.colno}", error.msg) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise FormatError(str(path), f"{field}: {first['msg']}" if field else first["msg"]) from None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` with its keys in the order given, indented, ended by a line break."""
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")


def read_lines(path: Path, model: type[M]) -> Iterator[M]:
    """One `model` a line; FormatError names the line that is none, and where in it the JSON breaks off."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield model.model_validate(orjson.loads(line))
            except ValidationError as error:
                first = error.errors()[0]
                raise FormatError(f"{path}:{number}", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
            except orjson.JSONDecodeError as error:
                raise FormatError(f"{path}:{number}:{error.colno}", error.msg) from None

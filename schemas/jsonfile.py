"""Read and write one JSON document that a pydantic model describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from kcap.errors import FormatError

T = TypeVar("T")


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

"""Which format a file or directory has, told by its content: not by its name, which may be anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from kcap.schemas.validation.formats import FORMATS

HEAD = 1 << 16  # bytes that a format is told by
TRACE_LINE = re.compile(rb"^\s*(Operator:|cnt:)", re.MULTILINE)
KEY = re.compile(rb'"(\w+)"\s*:')
PARQUET = b"PAR1"
BLANKS = b"\xef\xbb\xbf \t\r\n"  # and the byte order mark


def detect(path: Path) -> str | None:
    """The format of `path`, a key of FORMATS; None where nothing tells."""
    if path.is_dir():
        return _of_folder(path)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(PARQUET):
        return "parquet"
    if not head.lstrip(BLANKS).startswith((b"{", b"[")):
        return "trace-file" if TRACE_LINE.search(head) else None
    document = _first(path)
    if isinstance(document, dict):
        return _closest({key for key, value in document.items() if value is not None})
    is_list = isinstance(document, list) or head.lstrip(BLANKS).startswith(b"[")
    return "agent-trace" if is_list else _closest(_keys_in(head))


def _of_folder(path: Path) -> str | None:
    if (path / "recording.json").exists():
        return "recording"
    return "dataset" if (path / "definitions").is_dir() else None


def _first(path: Path) -> Any:
    """The document in the first line of `path`, or in the whole of it; None where it is no JSON."""
    with path.open("rb") as file:
        for content in (file.readline, file.read):
            try:
                file.seek(0)
                return orjson.loads(content())
            except orjson.JSONDecodeError:
                continue
    return None


def _keys_in(head: bytes) -> set[str]:
    return {key.decode() for key in KEY.findall(head)}


def _closest(keys: set[str]) -> str | None:
    """The format that has most of `keys`, and of those the one with the fewest more."""

    def likeness(name: str) -> tuple[int, int]:
        known = FORMATS[name].keys
        return len(known & keys), -len(known - keys)

    name = max((name for name, known in FORMATS.items() if known.keys), key=likeness)
    return name if FORMATS[name].keys & keys else None

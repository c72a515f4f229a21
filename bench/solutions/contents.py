"""The text of a file that anyone may have written: bounded, and from inside the folder that was named."""

from __future__ import annotations

import stat
from pathlib import Path

from kcap.errors import FormatError

MAX_BYTES = 16 << 20


def text_of(file: Path, folder: Path) -> str:
    """What `file` holds, without a byte order mark; FormatError if it cannot be read, or should not be."""
    try:
        return _bytes_of(file, folder).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(file.name, f"not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise FormatError(file.name, f"not readable ({getattr(error, 'strerror', None) or error})") from None


def _bytes_of(file: Path, folder: Path) -> bytes:
    if not file.resolve(strict=True).is_relative_to(folder.resolve()):
        raise FormatError(file.name, "a link that leads out of the folder: copy what it leads to")
    mode, size = (found := file.stat()).st_mode, found.st_size
    if stat.S_ISDIR(mode):
        raise FormatError(file.name, "a link to a folder, which is not followed")
    if not stat.S_ISREG(mode):
        raise FormatError(file.name, "no regular file")
    if size > MAX_BYTES:
        raise FormatError(file.name, f"larger than {MAX_BYTES >> 20} MiB")
    return file.read_bytes()

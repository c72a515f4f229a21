"""Standard error that may go away: nobody reads the pipe any more, its disk is full, the terminal is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class LossyStream:
    """`stream`; from the first write that fails on, what is written is lost, and no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            write_nowhere(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            write_nowhere(self._stream.fileno())


@contextlib.contextmanager
def lossy_standard_error() -> Iterator[None]:
    """While it lasts, no command ends because what it says cannot be written."""
    if sys.stderr is None:  # it was closed from the start
        yield
        return
    with contextlib.redirect_stderr(cast(TextIO, LossyStream(sys.stderr))):
        yield


def write_nowhere(descriptor: int) -> None:
    """What is written to it from now on is lost, also what a stream still holds for it."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)

"""File descriptors: what a candidate inherits, and what its output goes to."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from typing import TextIO

MOST = 1 << 20  # descriptors that a kernel gives one process, unless its fs.nr_open was raised


def close_others(kept: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not in `kept`."""
    start = 3
    for descriptor in sorted({each for each in kept if each > 2}):
        os.closerange(start, descriptor)
        start = descriptor + 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the other limit may have been lowered below what is open
    os.closerange(start, min(hard, MOST) if hard != resource.RLIM_INFINITY else MOST)


def redirect(output: int) -> None:
    """Read nothing, and print to `output`: for this process, for Python's own files, and for its children."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _text(1), _text(2)


def _text(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)

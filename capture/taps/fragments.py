"""Inductor: the ATen operators that a fused kernel stands for, as the wrapper around it has them in a comment.

torch writes that comment above its Triton kernels; while a kernel is compiled kcap.capture.taps.annotations adds to it,
and writes it above C++ kernels, so that wrappers read from inductor's cache have it, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

HEAD = "# Graph fragment:"
LINE = "#   "  # begins each line below it
REUSE = re.compile(r"^\s+(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*  # reuse$", re.MULTILINE | re.ASCII)
LONGEST = 1 << 20  # characters
MOST_FRAMES = 16


def file_of(fragment: str) -> str:
    """Its name in a Recording's kernels/."""
    return f"{hashlib.sha256(fragment.encode()).hexdigest()}.txt"


def fragment_of(scope: Mapping[str, Any], name: str) -> str | None:
    """The fragment of the kernel that the generated module of this `scope` calls `name`, and what it is called with.

    `%add : Tensor … = call_function[target=…](args = …)` a line, then `call(arg0_1, buf0, 64)`: what the kernel is
    first called with, by the wrapper's names; before it `reuse(buf4, buf1)` for each of these that took over another's
    memory. None where the wrapper's text is not there or has no such comment.
    """
    try:
        return _in_text(_text(str(scope.get("__file__"))), name)
    except (OSError, UnicodeDecodeError):
        return None


def bound_in(frame: FrameType | None, value: object) -> tuple[Mapping[str, Any], str] | None:
    """The globals of the nearest caller that hold `value`, and its name there."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        for name, known in list(frame.f_globals.items()):
            if known is value:
                return frame.f_globals, name
        frame = frame.f_back
    return None


@lru_cache(maxsize=2)
def _text(file: str) -> str:
    return Path(file).read_text()


def _in_text(text: str, name: str) -> str | None:
    start = text.find(f"\n{name} = async_compile.")
    head = text.rfind(HEAD, 0, max(start, 0))
    if head < 0:
        return None
    lines = text[head:start].splitlines()[1:]
    if not lines or len(text[head:start]) > LONGEST or not all(line.startswith(LINE) for line in lines):
        return None  # the comment of another kernel
    call = re.compile(rf"^\s+{re.escape(name)}(?:\.run)?(\(.*\))$", re.MULTILINE | re.ASCII).search(text, start)
    found = [line[len(LINE) :] for line in lines]
    if call:
        given = set(re.findall(r"\w+", call[1]))
        reused = [f"reuse({new}, {old})" for new, old in REUSE.findall(text, start, call.start()) if new in given]
        found += [*reused, f"call{call[1]}"]
    return "\n".join([*found, ""])

"""Why a Solution could not be built, in a line, and what was printed on the way."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

MAX_REASON, MAX_LOG = 500, 20_000  # characters
FIRST_ERROR = re.compile(r"^.*(?:\berror *:|error [A-Z]+\d+:|undefined reference to|cannot find -l).*$", re.MULTILINE)


class BuildFailed(Exception):
    """`reason` is one line; `log` is the beginning of the compiler's output, or the traceback of an import."""

    def __init__(self, reason: str, log: str = "") -> None:
        line = " ".join(reason.split())[:MAX_REASON]
        super().__init__(line)
        self.reason = line
        self.log = log[:MAX_LOG]


def said(error: BaseException) -> str:
    """`error` in words, even one whose `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


def of_import(error: BaseException) -> BuildFailed:
    """The failure of an import that raised `error`."""
    try:
        log = "".join(traceback.format_exception(error))
    except BaseException:
        log = ""
    return BuildFailed(said(error), log)


def of_compiler(output: str, sources: str) -> BuildFailed:
    """The failure of a compiler or linker that printed `output`; paths below the folder `sources` lose that prefix."""
    output = output.replace(f"{sources}/", "")
    found = FIRST_ERROR.search(output)
    return BuildFailed(f"does not compile: {found[0].strip() if found else output.strip()}", output)


def check_callable(function: Any, file: str, name: str) -> Callable[..., Any]:
    """`function`; BuildFailed if it is None, or nothing that can be called."""
    if function is None:
        raise BuildFailed(f"{file} defines no {name}")
    if not callable(function):
        raise BuildFailed(f"{file}: {name} is no function but of type {type(function).__name__}")
    found: Callable[..., Any] = function
    return found

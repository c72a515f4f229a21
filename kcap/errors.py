"""The one exception that kcap shows to its user, the exit codes of its commands, and what others' errors say."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
PARTIAL = 3

INSTALL_TORCH = "pip install 'kcap[torch]'"


class KcapError(Exception):
    """Something the user can mend; the message is one line and names the fix.

    `cli.main` prints it without a traceback and exits with `exit_code`: 1 the work failed,
    2 the call was wrong.
    """

    exit_code = FAILED


class CallError(KcapError):
    """The command itself was wrong: an unknown model, an output that exists."""

    exit_code = USAGE


class FormatError(KcapError):
    """A file does not hold what its format says; `place` is `path`, `path:line` or `path:line:column`."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


def first_line(error: BaseException, length: int | None = None) -> str:
    """Of what `error` says the first line, at most `length` characters of it; its kind, where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:length]


def kind_and_text(error: BaseException, length: int = 300) -> str:
    """The kind of `error` and all that it says, in one line: for a cause that nobody can look up later."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:length].removesuffix(": ")


def kind_and_line(error: BaseException, length: int | None = None) -> str:
    """The kind of `error`, and what `first_line` has of it."""
    kind, line = type(error).__name__, first_line(error, length)
    return kind if line == kind else f"{kind}: {line}"

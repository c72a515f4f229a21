"""Trace files read as a stream: one line in memory at a time, however long the file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from kcap.errors import FormatError
from kcap.schemas.backendbench.calls import Fault
from kcap.schemas.backendbench.grammar import Parser
from kcap.schemas.backendbench.line import MAX_COUNT, MAX_LINE, TraceLine
from kcap.schemas.operators import OperatorError, check_operator_name

Source: TypeAlias = "str | os.PathLike[str] | Iterable[str] | Iterable[bytes]"
OPERATOR = "Operator: "
COUNT = re.compile(r"cnt: ([0-9]{1,19}), (?=\()")
LOOSE_COUNT = re.compile(r"cnt:?[ \t]*+([0-9]*+),?[ \t]*+")
TOO_LONG = Fault(MAX_LINE, f"a line of more than {MAX_LINE >> 20} MiB")
KEPT_PROBLEMS = 100


@dataclass
class Problems:
    """What `read` skipped: how many lines, how many for each reason, and the first of them in full."""

    lines: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: list[FormatError] = field(default_factory=list)

    def add(self, error: FormatError) -> None:
        self.lines += 1
        known = error.reason in self.reasons or len(self.reasons) < KEPT_PROBLEMS
        self.reasons[error.reason if known else "other reasons"] += 1
        if len(self.first) < KEPT_PROBLEMS:
            self.first.append(error)


def read(source: Source, keep_going: bool = False, problems: Problems | None = None) -> Iterator[TraceLine]:
    """The lines of a trace file, or of an iterable of its lines. FormatError (`file:line:column`) at the first bad
    line; with `keep_going`, or a `problems` to count them in, bad lines are skipped instead."""
    if keep_going and problems is None:
        problems = Problems()
    place, lines = _open(source)
    operator: str | None = None
    for number, line in enumerate(lines, 1):
        try:
            text = _decode(line)
            if text.startswith(OPERATOR):
                operator = ""  # refused, unless the next line finds it good
                operator = _operator(text)
            elif text:
                yield _trace_line(text, number, operator)
        except Fault as fault:
            _report(FormatError(f"{place}:{number}:{fault.offset + 1}", fault.reason), problems)


def _report(error: FormatError, problems: Problems | None) -> None:
    if problems is None:
        raise error from None
    problems.add(error)


def _open(source: Source) -> tuple[str, Iterable[str | bytes]]:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), _file_lines(Path(source))
    return "<lines>", source


def _file_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                yield line
                if len(line) > MAX_LINE and not line.endswith(b"\n"):
                    _skip_line(file)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from None


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(MAX_LINE)) and not part.endswith(b"\n"):
        pass


def _decode(line: str | bytes) -> str:
    if len(line) > MAX_LINE:
        raise TOO_LONG
    try:
        text = line if isinstance(line, str) else line.decode()
    except UnicodeDecodeError as error:
        good = error.object[: error.start].decode()
        raise Fault(len(good), "not UTF-8") from None
    return text.rstrip(" \t\r\n")


def _operator(text: str) -> str:
    name = text[len(OPERATOR) :]
    try:
        check_operator_name(name)
    except OperatorError as error:
        raise Fault(len(OPERATOR) + error.offset, f"operator {error}") from None
    return name


def _trace_line(text: str, number: int, operator: str | None) -> TraceLine:
    match = COUNT.match(text)
    if match is None:
        raise _unknown(text)
    count = int(match[1])
    if not operator:
        reason = "before any 'Operator:' line" if operator is None else "its operator was refused"
        raise Fault(0, f"cnt: {reason}")
    if count > MAX_COUNT:
        raise Fault(match.start(1), "the count is more than 2**40")
    args, kwargs = Parser(text, match.end()).arguments()
    return TraceLine(operator, count, args, kwargs, number)


def _unknown(text: str) -> Fault:
    """Says what is wrong with a line that neither `Operator: ` nor `cnt: N, (` begins."""
    stripped = text.lstrip()
    if text.startswith("\ufeff"):
        return Fault(0, "the file begins with a byte order mark: save it as UTF-8 without one")
    if stripped != text and stripped.startswith(("cnt:", "Operator:")):
        return Fault(0, "blanks before the line's first word (BackendBench would ignore the line)")
    if text.startswith("cnt:"):
        return Fault(_first_fault(text), "expected 'cnt: N, ((…), {…})' with a count N from 0 to 2**40")
    return Fault(0, "neither 'Operator: NAME' nor 'cnt: N, ((…), {…})'")


def _first_fault(text: str) -> int:
    match = LOOSE_COUNT.match(text)
    if match is None:
        return 0
    return match.end() if len(match[1]) < 20 else match.start(1)

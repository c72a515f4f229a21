"""Trace files read and written as a stream: one line in memory at a time, however long the file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from kcap.errors import FormatError
from kcap.schemas.backendbench.grammar import Parser
from kcap.schemas.backendbench.lexer import Fault
from kcap.schemas.backendbench.line import MAX_COUNT, MAX_LINE, TraceLine
from kcap.schemas.backendbench.loss import Ledger, Loss, loss_path
from kcap.schemas.backendbench.text import Unwritable, serialize
from kcap.schemas.recording.operators import OperatorError, check_operator_name
from kcap.schemas.recording.recording import Argument
from kcap.schemas.recording.signature import signature

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
        listed = error.reason in self.reasons or len(self.reasons) < KEPT_PROBLEMS
        self.reasons[error.reason if listed else "other reasons"] += 1
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


def write(path: str | os.PathLike[str], lines: Iterable[TraceLine], loss: Loss | None = None) -> Loss:
    """Write `lines` to `path`, and what is lost beside it: `loss` (of `trace_lines`) and what cannot be written."""
    ledger = Ledger()
    written = Written()
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_texts(lines, ledger, written))
    whole = _joined(loss or Loss(), ledger.loss(), written)
    whole.write(loss_path(path))
    return whole


class Written:
    """How much of a trace file was written so far."""

    lines = 0
    calls = 0


def _texts(lines: Iterable[TraceLine], ledger: Ledger, written: Written) -> Iterator[str]:
    operator = None
    for line in lines:
        try:
            text = line_text(line)
        except (Unwritable, OperatorError) as error:
            ledger.miss(line.operator, short_text(line), str(error), max(line.count, 0))
            continue
        if line.operator != operator:
            operator = line.operator
            yield f"Operator: {operator}\n"
        written.lines += 1
        written.calls += line.count
        yield text


def line_text(line: TraceLine) -> str:
    """`cnt: 3, ((…), {…})` with its newline; Unwritable if the format cannot say it."""
    check_operator_name(line.operator)
    return count_text(line.count, serialize(line.args, line.kwargs))


def count_text(count: int, arguments: str) -> str:
    """The same of arguments that are serialized already."""
    if not 0 <= count <= MAX_COUNT:
        raise Unwritable("a count that is negative or more than 2**40")
    text = f"cnt: {count}, {arguments}\n"
    if len(text) > MAX_LINE:
        raise Unwritable(f"arguments of more than {MAX_LINE >> 20} MiB")
    return text


def short_text(line: TraceLine) -> str:
    """The arguments in a line's short form, for the sidecar."""
    keywords = [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
    return signature([Argument(value=value) for value in line.args] + keywords)


def _joined(before: Loss, now: Loss, written: Written) -> Loss:
    totals = before.totals.model_copy(
        update={
            "lines": written.lines,
            "written": written.calls,
            "not_carried": before.totals.not_carried + now.totals.not_carried,
        }
    )
    return before.model_copy(update={"totals": totals, "not_carried": before.not_carried + now.not_carried})

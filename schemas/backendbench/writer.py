"""Trace files written as a stream, with the sidecar of what they do not carry."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kcap.schemas.backendbench.line import MAX_COUNT, MAX_LINE, TraceLine
from kcap.schemas.backendbench.loss import Ledger, Loss, loss_path
from kcap.schemas.backendbench.text import Unwritable, serialize
from kcap.schemas.operators import OperatorError, check_operator_name
from kcap.schemas.recording import Argument
from kcap.schemas.signature import signature


def write(path: str | os.PathLike[str], lines: Iterable[TraceLine], loss: Loss | None = None) -> Loss:
    """Write `lines` in their order to `path`, and what is lost beside it: `loss` (of `trace_lines`), completed by the
    lines that the format cannot carry."""
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

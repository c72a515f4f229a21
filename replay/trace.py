"""Lines of a trace file or parquet as Calls: a signature on several lines is one Call with their summed count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson

from kcap.schemas.backendbench import Problems, TraceLine
from kcap.schemas.recording import Argument, Call, Count
from kcap.schemas.source import trace_lines
from kcap.schemas.values import encode


def calls(path: Path, problems: Problems | None) -> list[Call]:
    """The Calls of the file `path`; bad lines are counted in `problems`, or raise FormatError without one."""
    return merge(trace_lines(path, problems))


def merge(lines: Iterable[TraceLine]) -> list[Call]:
    merged: dict[bytes, Call] = {}
    for line in lines:
        call = to_call(line, len(merged))
        key = orjson.dumps([call.operator, [[a.name, encode(a.value)] for a in call.args]])
        known = merged.get(key)
        total = line.count + (known.total if known else 0)
        merged[key] = (known or call).model_copy(update={"counts": [Count(phase="other", count=total)]})
    return list(merged.values())


def to_call(line: TraceLine, number: int) -> Call:
    """One line; positional arguments have no names here, the operator's schema gives them at replay."""
    args = [Argument(value=value) for value in line.args]
    args += [Argument(name=name, value=value, keyword=True) for name, value in line.kwargs.items()]
    return Call(id=number, operator=line.name, args=args, counts=[Count(phase="other", count=line.count)])

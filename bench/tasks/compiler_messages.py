"""What compilers and Python say, taken apart: file, line, column, text. A log in no known form gives nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from kcap.schemas.results.verdict import CompilerMessage

MOST = 20
Severity = Literal["error", "warning", "note"]

KIND = r"(?P<kind>error|warning|note)"
# gcc, clang: kernel.cu:12:5: error: expected ';'
GNU = re.compile(rf"^(?P<file>[^\s:(][^:(\n]*):(?P<line>\d+)(?::(?P<column>\d+))?: (?:fatal )?{KIND}: ")
# nvcc: kernel.cu(12): error: expected a ";"
NVCC = re.compile(rf"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:catastrophic )?{KIND}[^:]*: ")
# ptxas application.ptx, line 1234; error   : Unknown symbol
PTXAS = re.compile(rf"^ptxas (?P<file>[^,\n]+), line (?P<line>\d+); {KIND}\s*: ")
PYTHON = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)): ?(?P<text>.*)$")


def compiler_messages(log: str, sources: Sequence[str] = ()) -> list[CompilerMessage]:
    """The messages in `log`, errors first. `sources`: the Solution's own files, by which a traceback's frames are told:
    of Python, the last frame in one of them, else the last of all.
    """
    messages = [*_of_compilers(log), *_of_python(log, sources)]
    distinct = list({message.model_dump_json(): message for message in messages}.values())
    return sorted(distinct, key=lambda message: message.severity != "error")[:MOST]


def _of_compilers(log: str) -> Iterator[CompilerMessage]:
    for line in log.splitlines():
        for form in (GNU, NVCC, PTXAS):
            if match := form.match(line):
                parts = match.groupdict()
                yield CompilerMessage(
                    file=_short(parts["file"]),
                    line=max(int(parts["line"]), 1),
                    column=int(parts["column"]) if parts.get("column") else None,
                    severity=cast("Severity", parts["kind"]),
                    text=line[match.end() :].strip(),
                )
                break


def _of_python(log: str, sources: Sequence[str]) -> Iterator[CompilerMessage]:
    frames: list[tuple[str, int]] = []
    for line in log.splitlines():
        if match := PYTHON.match(line):
            frames.append((match["file"], int(match["line"])))
        elif frames and (raised := RAISED.match(line)):
            names = {source.rpartition("/")[2] for source in sources}
            own = [frame for frame in frames if frame[0].rpartition("/")[2] in names]
            file, number = (own or frames)[-1]
            text = f"{raised['name'].rpartition('.')[2]}: {raised['text']}".strip(": ")
            yield CompilerMessage(file=_short(file), line=max(number, 1), text=text)
            frames = []


def _short(file: str) -> str:
    """The file's own name: a Solution is built in a folder that is gone."""
    return file.strip().rpartition("/")[2]

"""The Recording: the directory that `kcap record` writes, lossless, the source of every other format.

    recording.json   Metadata: format, model, framework, device, taps and their health, totals, what was dropped
    calls.jsonl      one Call a line, with its counts
    programs.jsonl   the ordered Calls of one step or captured graph, with the times it ran
    steps.jsonl      a bounded sample of steps; the exact totals are in recording.json
    requests.jsonl   what the steps computed for each request, where the engine names them
    samples.jsonl    what single invocations held; integer values lie in values/, named by their SHA-256
    values/          safetensors files, gzip'd (or, older ones, not), each with one tensor `value`
    kernels/         the sources of kernels that no library holds (Triton, inductor), the ATen operators that those of
                     inductor stand for (.txt), and libraries of TVM and tvm-ffi (.so), named by their SHA-256

Writing is deterministic: the same content gives the same bytes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from kcap.errors import FormatError
from kcap.schemas.files.jsonfile import read_json, read_lines
from kcap.schemas.recording.phases import PHASES, Phase
from kcap.schemas.recording.records import (
    FORMAT,
    Argument,
    Call,
    Count,
    GraphUse,
    Launch,
    Metadata,
    Mode,
    Program,
    Record,
    Request,
    Sample,
    SampledTensor,
    Step,
    Tap,
    ValueField,
    working_kernels,
)

__all__ = [
    "FORMAT",
    "PHASES",
    "Argument",
    "Call",
    "Count",
    "GraphUse",
    "Launch",
    "Metadata",
    "Mode",
    "Phase",
    "Program",
    "Record",
    "Recording",
    "Request",
    "Sample",
    "SampledTensor",
    "Step",
    "Tap",
    "ValueField",
    "load",
    "write_recording",
]


GZIP = b"\x1f\x8b"


MOST_BYTES = 1 << 30  # of one value


class Recording:
    """A Recording read from disk; its lines are parsed when they are first asked for."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self.metadata = metadata

    @cached_property
    def calls(self) -> list[Call]:
        """FormatError, too, where they are not as many as were recorded: lines at the end are missing."""
        path = self.path / "calls.jsonl"
        calls = list(_read_lines(path, Call))
        recorded = self.metadata.totals.get("calls", len(calls))
        if len(calls) != recorded:
            raise FormatError(str(path), f"has {len(calls)} of {recorded} calls: the Recording is damaged")
        return calls

    @cached_property
    def programs(self) -> list[Program]:
        return list(_read_lines(self.path / "programs.jsonl", Program))

    @cached_property
    def steps(self) -> list[Step]:
        return list(_read_lines(self.path / "steps.jsonl", Step))

    @cached_property
    def requests(self) -> list[Request]:
        """Empty where the engine names none, or the Recording was made before format 1.7."""
        path = self.path / "requests.jsonl"
        return list(_read_lines(path, Request)) if path.exists() else []

    @cached_property
    def samples(self) -> list[Sample]:
        """By line: those drawn from all invocations, and those that stand for a profiled step alone (`compared`)."""
        return list(_read_lines(self.path / "samples.jsonl", Sample))

    @cached_property
    def drawn_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.compared]

    @cached_property
    def sample_by_call(self) -> dict[int, Sample]:
        """The last drawn Sample of each Call that has any."""
        return {sample.call: sample for sample in self.drawn_samples}

    def kernels(self, hidden: bool = False) -> list[Call]:
        """The Calls that count as kernels; `hidden` adds views and allocations."""
        return [call for call in self.calls if call.kind == "kernel"] if hidden else working_kernels(self.calls)

    def ran(self, program: Program) -> Iterator[Call]:
        """Every Call of `program` in order, those of the graphs that it replayed among them; FormatError if damaged."""
        replayed = iter(program.graphs)
        upcoming = next(replayed, None)
        for position in range(len(program.calls) + 1):
            while upcoming is not None and upcoming[0] == position:
                yield from map(self._call, self.program(upcoming[1]).calls)
                upcoming = next(replayed, None)
            if position < len(program.calls):
                yield self._call(program.calls[position])

    def _call(self, number: int) -> Call:
        if not 0 <= number < len(self.calls):
            raise FormatError(
                str(self.path / "programs.jsonl"), f"names a Call {number} that calls.jsonl does not have"
            )
        return self.calls[number]

    def program(self, number: int) -> Program:
        """The Program of this id; FormatError if there is none."""
        if not 0 <= number < len(self.programs):
            raise FormatError(str(self.path / "programs.jsonl"), f"names a Program {number} that it does not have")
        return self.programs[number]

    def source(self, launch: Launch) -> str:
        """The text in kernels/ that `launch` names; FormatError if it is missing or not what its name says."""
        if launch.kernel is None:
            raise FormatError(str(self.path), f"the source of {launch.function} was not read: {launch.unread}")
        return self._text(launch.kernel)

    def library(self, launch: Launch) -> Path:
        """The file in kernels/ that `launch` names, compiled code; FormatError as `source`."""
        self._content(launch.kernel or "")
        return self.path / "kernels" / Path(launch.kernel or "").name

    def fragment(self, launch: Launch) -> str | None:
        """The ATen operators that a kernel of inductor stands for (kcap.schemas.derive.fragment.reference reads them).

        None where torch reported none; FormatError if the file is missing or not what its name says.
        """
        return None if launch.fragment is None else self._text(launch.fragment)

    def _text(self, name: str) -> str:
        try:
            return self._content(name).decode()
        except UnicodeDecodeError as error:
            raise FormatError(str(self.path / "kernels" / name), f"no text: {error.reason}") from None

    def _content(self, name: str) -> bytes:
        path = self.path / "kernels" / Path(name).name
        try:
            content = _file_content(path)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            raise FormatError(str(path), f"not readable ({getattr(error, 'strerror', error)})") from None
        if not is_named_by(content, path.name):
            raise FormatError(str(path), "its content is not what its name says: the Recording was changed")
        return content

    def value(self, tensor: SampledTensor) -> Any:
        """The sampled integer tensor as a torch tensor, or None where only its range was recorded, or the Recording
        was passed on without its values."""
        from safetensors.torch import load

        return self._value(tensor, load)

    def array(self, tensor: SampledTensor) -> Any:
        """The same as a numpy array, for which torch is not needed."""
        from safetensors.numpy import load

        return self._value(tensor, load)

    def _value(self, tensor: SampledTensor, read: Callable[[bytes], dict[str, Any]]) -> Any:
        values = self.path / "values"
        if tensor.file is None or not values.is_dir():
            return None
        path = values / Path(tensor.file).name
        try:
            return read(_unpacked(path))["value"]
        except Exception as error:
            raise FormatError(str(path), f"not a readable safetensors file ({error})") from None


def is_named_by(content: bytes, name: str) -> bool:
    """Whether a file called `name` holds what that says: it begins with the SHA-256 of its content."""
    return hashlib.sha256(content).hexdigest() == name.split(".")[0]


def _file_content(path: Path) -> bytes:
    """OSError for a pipe and a device, too, which may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file")
    return path.read_bytes()


def _unpacked(path: Path) -> bytes:
    content = _file_content(path)
    if not content.startswith(GZIP):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return content


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a Recording; FormatError if it is none, is damaged, or has a newer major format."""
    root = Path(path)
    file = root / "recording.json"
    if not file.is_file():
        raise FormatError(str(root), "not a Recording: it has no recording.json (kcap record writes one)")
    metadata = read_json(file, TypeAdapter(Metadata))
    for reason in refuse_formatless(metadata):
        raise FormatError(str(file), reason)
    try:
        major = int(metadata.format.split(".")[0])
    except ValueError as error:
        raise FormatError(str(file), f"format: {error}") from None
    if major > FORMAT[0]:
        raise FormatError(str(file), f"format {metadata.format} is newer than {FORMAT[0]}.x: upgrade kcap to read it")
    return Recording(root, metadata)


def refuse_formatless(metadata: Metadata) -> list[str]:
    """Why a document that was read is no Recording's: any object of JSON else has the keys that it must have."""
    return [] if "format" in metadata.model_fields_set else ["has no format: not a Recording's"]


R = TypeVar("R", bound=Record)


def _read_lines(path: Path, model: type[R]) -> Iterator[R]:
    if not path.is_file():
        raise FormatError(str(path), "missing: the Recording is damaged")
    return read_lines(path, model)


def write_recording(
    path: Path,
    metadata: Metadata,
    calls: Iterable[Call],
    programs: Iterable[Program] = (),
    steps: Iterable[Step] = (),
    samples: Iterable[Sample] = (),
    values: Mapping[str, bytes] | None = None,
    kernels: Mapping[str, bytes] | None = None,
    requests: Sequence[Request] = (),
) -> None:
    """Write a Recording into `path` (made with mode 0700); recording.json is last: it marks the rest as complete."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    tables: dict[str, Iterable[Record]] = {"calls": calls, "programs": programs, "steps": steps, "samples": samples}
    if requests:
        tables["requests"] = requests
    for name, records in tables.items():
        with (path / f"{name}.jsonl").open("wb") as file:
            file.writelines(record.line() for record in records)
    for folder, files in {"values": values, "kernels": kernels}.items():
        (path / folder).mkdir(mode=0o700, exist_ok=True)
        for name, content in sorted((files or {}).items()):
            (path / folder / name).write_bytes(content)
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    (path / "recording.json").write_bytes(orjson.dumps(metadata.model_dump(mode="json"), option=options) + b"\n")

"""The FlashInfer schema set's benchmark result: one kernel on one device, in either of its two forms.

Success carries `time`, `speedup` and `max_diff`; a compilation failure carries `compile_error`; `compiled` tells
them apart. The set gives `time` no unit: here it is milliseconds. What was not measured is left out, and so is
any field that the set does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kcap.schemas.files.jsonfile import read_json, write_json

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Device(_Form):
    """The device that the kernel ran on, as its driver names it."""

    name: str


class Success(_Form):
    """A kernel that compiled and ran. `time`: milliseconds; `speedup`: over the reference; `max_diff`: absolute."""

    device: Device
    kernel_id: str
    source: str
    compiled: Literal[True] = True
    time: Number
    speedup: Number | None = None
    max_diff: Number | None = None


class CompilationFailure(_Form):
    """A kernel that did not compile, with the compiler's words."""

    device: Device
    kernel_id: str
    source: str
    compiled: Literal[False] = False
    compile_error: str


BenchmarkResult: TypeAlias = Success | CompilationFailure
ADAPTER: TypeAdapter[BenchmarkResult] = TypeAdapter(Annotated[BenchmarkResult, Field(discriminator="compiled")])


def read(path: Path) -> BenchmarkResult:
    """The result in `path`; FormatError if it is neither form."""
    return read_json(path, ADAPTER)


def write(path: Path, result: BenchmarkResult) -> None:
    """Write `result` in its form."""
    write_json(path, result.model_dump(exclude_none=True))

"""The FlashInfer schema set's benchmark result: one kernel on one device, in either of its two forms.

Success carries `time`, `speedup` and `max_diff`; a compilation failure carries `compile_error`; `compiled` tells
them apart. The set gives `time` no unit: here it is milliseconds. What was not measured is left out. The set shows two
examples and no more: a field that neither has, or that the other form has, is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from kcap.schemas.files.jsonfile import read_json, write_json

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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


def _form(result: Any) -> str | None:
    compiled = result.get("compiled") if isinstance(result, dict) else getattr(result, "compiled", None)
    return {"True": "success", "False": "failure"}.get(repr(compiled))


_TAGGED = Annotated[Success, Tag("success")] | Annotated[CompilationFailure, Tag("failure")]
_BY_FORM = Discriminator(_form, custom_error_type="form", custom_error_message="compiled must be true or false")
ADAPTER: TypeAdapter[BenchmarkResult] = TypeAdapter(Annotated[_TAGGED, _BY_FORM])


def read(path: Path) -> BenchmarkResult:
    """The result in `path`; FormatError if it is neither form."""
    return read_json(path, ADAPTER)


def write(path: Path, result: BenchmarkResult) -> None:
    """Write `result` in its form."""
    write_json(path, result.model_dump(exclude_none=True))

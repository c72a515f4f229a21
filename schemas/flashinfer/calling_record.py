"""The FlashInfer schema set's kernel calling record: which kernels a model on a framework called, how often.

Its form is `{"model": "meta-llama/Llama-3.1-8B", "framework": "vLLM", "kernels": [{"id": "rmsnorm", "count": 4}]}`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from kcap.schemas.files.jsonfile import read_json, write_json
from kcap.schemas.recording.recording import Metadata

Framework = Literal["SGLang", "vLLM", "MLC-LLM", "TRT-LLM"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


class KernelCount(BaseModel):
    """One kernel of the record: its id, and how many times it was invoked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=0)]


class CallingRecord(BaseModel):
    """The whole record. `model` is a Hugging Face name or another identifier; each kernel is listed once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(strict=True, min_length=1)]
    framework: Framework
    kernels: list[KernelCount]

    @field_validator("kernels")
    @classmethod
    def _lists_each_once(cls, kernels: list[KernelCount]) -> list[KernelCount]:
        if twice := [name for name, times in Counter(kernel.id for kernel in kernels).items() if times > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        return kernels


ADAPTER = TypeAdapter(CallingRecord)


def read(path: Path) -> CallingRecord:
    """The record in `path`; FormatError if it has a field too many, too few or of the wrong kind."""
    return read_json(path, ADAPTER)


def write(path: Path, record: CallingRecord) -> None:
    """Write `record`, the kernel called most often first, equal counts by id."""
    kernels = sorted(record.kernels, key=lambda kernel: (-kernel.count, kernel.id))
    write_json(path, record.model_copy(update={"kernels": kernels}).model_dump())


def framework_of(metadata: Metadata) -> Framework | None:
    """The framework as the record names it; None if it is none of the four."""
    return next((name for name in FRAMEWORKS if name == metadata.framework), None)

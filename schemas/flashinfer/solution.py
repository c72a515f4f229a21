"""FlashInfer-Bench's Solution: sources that implement a Definition, and how to build and call them.

Source: FlashInfer-Bench 0.1.2, `data/solution.py`. `destination_passing_style` is always written, because FlashInfer's
own schema takes the opposite default.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from kcap.schemas.files.jsonfile import dump_json, parse_json
from kcap.schemas.files.strict_model import FileName, StrictModel, Text

Language = Literal["python", "triton", "cpp", "cuda", "tilelang"]


class SourceFile(StrictModel):
    """One file. `path` is relative to the folder that the Solution is built in."""

    path: Text
    content: Text

    @field_validator("path")
    @classmethod
    def _stays_in_its_folder(cls, path: str) -> str:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise ValueError("must be relative, without ..")
        return path


class BuildSpec(StrictModel):
    """How the sources become a function.

    `entry_point` is `file::function`. With `destination_passing_style` the function takes the outputs, allocated, after
    the inputs; without, it returns them. `binding` None: tvm-ffi, for C++ and CUDA.
    """

    written: ClassVar[frozenset[str]] = frozenset({"destination_passing_style"})

    language: Language
    target_hardware: Annotated[list[str], Field(min_length=1)]
    entry_point: Text
    dependencies: list[Text] = []
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None

    @field_validator("entry_point")
    @classmethod
    def _names_file_and_function(cls, entry_point: str) -> str:
        if entry_point.count("::") != 1:
            raise ValueError("must be file::function")
        return entry_point

    @property
    def entry_file(self) -> str:
        return self.entry_point.split("::")[0]

    @property
    def entry_function(self) -> str:
        return self.entry_point.split("::")[1]


class Solution(StrictModel):
    """One implementation of the Definition named `definition`."""

    name: FileName
    definition: FileName
    author: FileName
    spec: BuildSpec
    sources: Annotated[list[SourceFile], Field(min_length=1)]
    description: str | None = None

    @model_validator(mode="after")
    def _sources_have_the_entry(self) -> Solution:
        paths = [source.path for source in self.sources]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"sources: {twice[0]} is there twice")
        if self.spec.entry_file not in paths:
            raise ValueError(f"spec.entry_point: {self.spec.entry_file} is not among sources")
        return self

    @property
    def key(self) -> str:
        """`definition/author/name`, by which a run of `kcap bench` names it."""
        return f"{self.definition}/{self.author}/{self.name}"

    @property
    def sha256(self) -> str:
        """Of its JSON document: what was judged is known again by it."""
        return hashlib.sha256(to_bytes(self)).hexdigest()


ADAPTER = TypeAdapter(Solution)


def from_bytes(content: bytes, place: str = "Solution") -> Solution:
    """The Solution in `content`; FormatError names what is wrong in `place`."""
    return parse_json(content, ADAPTER, place)


def to_bytes(solution: Solution) -> bytes:
    """The JSON document of `solution`, indented."""
    return dump_json(solution.model_dump(mode="json"))


def read(path: Path) -> Solution:
    """The Solution in `path`; FormatError if it has a field too many, too few or of the wrong kind."""
    return from_bytes(path.read_bytes(), str(path))


def write(path: Path, solution: Solution) -> None:
    """Write `solution`."""
    path.write_bytes(to_bytes(solution))

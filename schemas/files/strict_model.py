"""Strict, immutable models for FlashInfer's JSON formats; they are written with the keys that they were read with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler
from pydantic import model_serializer as serializer

MAX_NAME = 200  # bytes; `<name>_<uuid>.safetensors` must stay below the 255 that file systems take


class StrictModel(BaseModel):
    """A strict JSON object: unknown keys and values of another type are refused, and it cannot be changed.

    A key with a default is written where it was given or is among `written`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    written: ClassVar[frozenset[str]] = frozenset({"type"})

    @serializer(mode="wrap")
    def _with_the_keys_given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        keys = self.model_fields_set | self.written
        return {key: value for key, value in serialize(self).items() if key in keys}


def _file_name(name: str) -> str:
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ValueError("must be a file name: no slash, backslash or control character, not . or ..")
    if len(name.encode()) > MAX_NAME:
        raise ValueError(f"must be a file name: at most {MAX_NAME} bytes")
    return name


def _null_is_empty(value: Any) -> Any:
    return [] if value is None else value


Text = Annotated[str, Field(min_length=1)]
FileName = Annotated[Text, AfterValidator(_file_name)]
Size = Annotated[int, Field(ge=0)]
Texts = Annotated[list[Text], BeforeValidator(_null_is_empty)]  # null is read as an empty list, and never written


class Shaped(Protocol):
    """A tensor whose shape names axes; None: a Python scalar."""

    @property
    def shape(self) -> list[str] | None: ...


def check_tensors(axes: Collection[str], inputs: Mapping[str, Shaped], outputs: Mapping[str, Shaped]) -> None:
    """ValueError if names are both inputs and outputs, or shapes have axes that are not among `axes`: it names all."""
    wrong = [f"{name}: both an input and an output" for name in inputs if name in outputs]
    for kind, tensors in (("inputs", inputs), ("outputs", outputs)):
        for name, tensor in tensors.items():
            unknown = dict.fromkeys(axis for axis in tensor.shape or () if axis not in axes)
            wrong += [f"{kind}.{name}: its axis {axis} is not among axes" for axis in unknown]
    if wrong:
        raise ValueError("; ".join(wrong))

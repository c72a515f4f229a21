"""One table for every format's dtype names: torch's own, BackendBench's short words, FlashInfer's where they differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype under torch's name, its size, and the word the trace file has for it (None: it has none)."""

    name: str
    bits: int
    word: str | None = None
    kind: str = "float"  # float, int, bool or complex


_ALL = (
    DType("bfloat16", 16, "bf16"),
    DType("float16", 16, "f16"),
    DType("float32", 32, "f32"),
    DType("float64", 64, "f64"),
    DType("complex32", 32, "c32", "complex"),
    DType("complex64", 64, "c64", "complex"),
    DType("complex128", 128, "c128", "complex"),
    DType("int8", 8, "i8", "int"),
    DType("int16", 16, "i16", "int"),
    DType("int32", 32, "i32", "int"),
    DType("int64", 64, "i64", "int"),
    DType("uint8", 8, "u8", "int"),
    DType("bool", 8, "b8", "bool"),
    DType("uint16", 16, None, "int"),
    DType("uint32", 32, None, "int"),
    DType("uint64", 64, None, "int"),
    DType("float8_e4m3fn", 8),
    DType("float8_e4m3fnuz", 8),
    DType("float8_e5m2", 8),
    DType("float8_e5m2fnuz", 8),
    DType("float8_e8m0fnu", 8),
    DType("float4_e2m1fn_x2", 8),
)

BY_NAME = {d.name: d for d in _ALL}
BY_WORD = {d.word: d for d in _ALL if d.word}

TORCH_NAMES = {  # of FlashInfer's names that are not torch's; the second packs two numbers into a byte
    "float8_e4m3": "float8_e4m3fn",
    "float4_e2m1": "float4_e2m1fn_x2",
}


def word(name: str) -> str:
    """The trace file's word for torch's dtype `name` (`bf16`), or the name itself where it has none."""
    dtype = BY_NAME.get(name)
    return (dtype.word if dtype else None) or name

"""The words of the trace file's arguments: dtype words, torch's named objects, and devices."""

from __future__ import annotations

import re

from kcap.schemas.dtypes import BY_NAME, BY_WORD
from kcap.schemas.values import TorchConstant

LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}
DEVICE = re.compile(r"[a-z]{1,16}(?::\d{1,3})?", re.ASCII)
QUOTED_DEVICE = re.compile(r"torch\.device\('([a-z]{1,16}(?::\d{1,3})?)'\)", re.ASCII)

DTYPE_WORDS = {word: TorchConstant("dtype", dtype.name) for word, dtype in BY_WORD.items()}
TORCH = (
    {name: TorchConstant("dtype", name) for name in BY_NAME}
    | {alias: TorchConstant("dtype", name) for alias, name in ALIASES.items()}
    | {name: TorchConstant("layout", name) for name in LAYOUTS}
    | {name: TorchConstant("memory_format", name) for name in MEMORY_FORMATS}
)
CONSTANTS = (
    DTYPE_WORDS | {f"torch.{name}": value for name, value in TORCH.items()} | {f"th.{n}": v for n, v in TORCH.items()}
)
LITERALS: dict[str, bool | float | None] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
}


def constant_text(value: TorchConstant) -> str | None:
    """How the trace file writes a torch object; None where it has no way."""
    if value.kind == "device":
        return f"torch.device('{value.name}')" if DEVICE.fullmatch(value.name) else None
    word = BY_NAME[value.name].word if value.kind == "dtype" and value.name in BY_NAME else None
    return word or (f"torch.{value.name}" if TORCH.get(value.name) == value else None)

"""The storage offsets in a shard's values: a tensor's, or those of a list's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def offsets_of(value: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """Where each tensor of an argument begins in its storage; None where its line leaves that out."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from offsets_of(item, f"{path}.{index}")
    elif isinstance(value, dict) and "tensor" in value:
        yield path, value["tensor"].get("offset", 0)


def without_offsets(value: Any) -> Any:
    """The value with its offsets left out; equal values give equal bytes."""
    if isinstance(value, list):
        return [without_offsets(item) for item in value]
    if isinstance(value, dict) and "tensor" in value:
        rest = {key: item for key, item in value["tensor"].items() if key != "offset"}
        return {"tensor": {**rest, "offset": None}}
    return value

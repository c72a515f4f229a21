"""The argument tree of a Call: an operator's arguments as plain data.

JSON form: numbers, strings, booleans, null and lists stand for themselves; everything else is an object
with one key: `{"tensor": …}`, `{"dtype": "bfloat16"}`, `{"layout": "strided"}`, `{"memory_format": …}`,
`{"device": "cuda"}`, `{"triton": "fp16"}`, `{"float": "inf"}`, `{"complex": [re, im]}`, `{"drift": "int"}`,
`{"folded": "layers.*"}`, `{"opaque": "PyObject"}`, `{"group": {"size": 2, "rank": 0, "name": "tp"}}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kcap.schemas.recording.dtypes import BY_NAME

MAX_ELEMENTS = 1 << 56  # torch counts elements and bits in 63 bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data. Shape, strides and offset count elements; `strides` None means contiguous.

    `storage` numbers the memory it lives in: tensors of one Call with the same number share it.
    `offset` None means that it drifts from call to call: the Samples carry it. `mapped`: it is pinned memory of the
    host, which the GPU reads and writes there (zero-copy); so it was when the Call was seen first. Since format 1.10.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    offset: int | None = 0
    device: str = "cpu"
    storage: int = 0
    mapped: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        return BY_NAME[self.dtype].bits

    @property
    def effective_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return contiguous_strides(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last that the tensor can reach, without its offset."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.effective_strides, strict=True))


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """An object named by a word. `kind`: dtype, layout, memory_format or device, as torch has them; triton: a dtype."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Drift:
    """A scalar (or list of scalars) that changes from call to call; the Samples carry its value."""

    type: str


@dataclass(frozen=True, slots=True)
class Folded:
    """A string whose numbers were folded, so that layer 0 and layer 31 make one Call."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that cannot be written down: a Python object, a generator, a sparse tensor."""

    type: str


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: how many processes it has, this process's rank in it, and what the engine calls it, if it does.

    Of a group with a name recording.json lists all ranks, under `ranks`.
    """

    size: int
    rank: int
    name: str = ""


Value: TypeAlias = (
    "bool | int | float | complex | str | TensorSpec | TorchConstant | Drift | Folded | Opaque | Group | list[Value] "
    "| None"
)
CONSTANT_KINDS = ("dtype", "layout", "memory_format", "device", "triton")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape (torch's rule: a zero size counts as one)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def encode(value: Value) -> Any:
    """The JSON form of `value`."""
    match value:
        case list():
            return [encode(item) for item in value]
        case float() if not math.isfinite(value):
            return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        case None | bool() | int() | float() | str():
            return value
        case complex():
            return {"complex": [encode(value.real), encode(value.imag)]}
        case TensorSpec():
            return {"tensor": _encode_tensor(value)}
        case TorchConstant():
            return {value.kind: value.name}
        case Drift():
            return {"drift": value.type}
        case Folded():
            return {"folded": value.pattern}
        case Opaque():
            return {"opaque": value.type}
        case Group():
            named = {"name": value.name} if value.name else {}
            return {"group": {"size": value.size, "rank": value.rank, **named}}
    raise TypeError(f"not a Value: {value!r}")


def _encode_tensor(spec: TensorSpec) -> dict[str, Any]:
    out: dict[str, Any] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if spec.strides is not None:
        out["strides"] = list(spec.strides)
    if spec.offset != 0:
        out["offset"] = spec.offset
    mapped = {"mapped": True} if spec.mapped else {}
    return {**out, "device": spec.device, "storage": spec.storage, **mapped}


def decode(data: Any, depth: int = 0) -> Value:
    """The Value that `data` (parsed JSON, or a Value already) stands for; ValueError says what is wrong with it."""
    if depth > 32:
        raise ValueError("an argument is nested more than 32 deep")
    if data is None or isinstance(data, bool | int | float | complex | str | TensorSpec | TorchConstant):
        return data
    if isinstance(data, Drift | Folded | Opaque | Group):
        return data
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        return _decode_tagged(*next(iter(data.items())))
    raise ValueError(f"not an argument: {str(data)[:80]}")


def _decode_group(body: Any) -> Group:
    if not isinstance(body, dict):
        raise ValueError("a group is an object")
    size, rank, name = body.get("size"), body.get("rank"), body.get("name", "")
    if type(size) is not int or type(rank) is not int or not 0 <= rank < size:
        raise ValueError("a group has a size, and a rank below it")
    if not isinstance(name, str):
        raise ValueError("a group's name is a string")
    return Group(size, rank, name)


def _decode_tagged(tag: str, body: Any) -> Value:
    if tag == "tensor":
        return _decode_tensor(body)
    if tag == "group":
        return _decode_group(body)
    if tag == "complex" and isinstance(body, list) and len(body) == 2:
        return complex(_number(body[0]), _number(body[1]))
    if not isinstance(body, str):
        raise ValueError(f"{tag} must be a string")
    if tag in CONSTANT_KINDS:
        return TorchConstant(tag, body)
    if tag == "float" and body in ("inf", "-inf", "nan"):
        return float(body)
    kinds: dict[str, type[Drift | Folded | Opaque]] = {"drift": Drift, "folded": Folded, "opaque": Opaque}
    if tag not in kinds:
        raise ValueError(f"unknown kind of argument: {tag}")
    return kinds[tag](body)


def _number(data: Any) -> float:
    value = decode(data)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return float(value)


def _decode_tensor(body: Any) -> TensorSpec:
    if not isinstance(body, dict) or not {"shape", "dtype"} <= set(body):
        raise ValueError("a tensor needs shape and dtype")
    if not isinstance(body["dtype"], str) or body["dtype"] not in BY_NAME:
        raise ValueError(f"unknown dtype: {str(body['dtype'])[:40]}")
    shape = _sizes(body["shape"], "shape")
    strides = None if body.get("strides") is None else _sizes(body["strides"], "strides")
    if strides is not None and len(strides) != len(shape):
        raise ValueError("shape and strides differ in length")
    offset = body.get("offset", 0)
    if offset is not None:
        (offset,) = _sizes([offset], "offset")
    (storage,) = _sizes([body.get("storage", 0)], "storage")
    if not isinstance(mapped := body.get("mapped", False), bool):
        raise ValueError("mapped is neither true nor false")
    spec = TensorSpec(shape, body["dtype"], strides, offset, str(body.get("device", "cpu")), storage, mapped)
    if max(math.prod(max(n, 1) for n in shape), spec.extent, offset or 0) > MAX_ELEMENTS:
        raise ValueError("a tensor of more elements than any memory has")
    return spec


def _sizes(data: Any, what: str) -> tuple[int, ...]:
    if not isinstance(data, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in data):
        raise ValueError(f"{what} must be a list of integers that are not negative")
    return tuple(data)


def without_mapped(value: Value) -> Value:
    """`value` with no tensor mapped, which is no part of a Call's identity: its first invocation decides it."""
    if isinstance(value, list):
        return [without_mapped(item) for item in value]
    return replace(value, mapped=False) if isinstance(value, TensorSpec) else value


def tensors(value: Value, path: str = "") -> Iterator[tuple[str, TensorSpec]]:
    """Every tensor in the tree with its path: `tensors(args)` gives `"0"`, `"2.1"` (list item 1 of argument 2)."""
    if isinstance(value, TensorSpec):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}.{index}" if path else str(index))


def storage_bytes(specs: Iterable[TensorSpec]) -> list[int]:
    """Bytes of the elements of each storage among `specs`, as much of it as its largest tensor reaches."""
    largest: dict[tuple[str, int], int] = {}
    for spec in specs:
        key = (spec.device, spec.storage)
        largest[key] = max(largest.get(key, 0), min(spec.numel, spec.extent) * spec.bits // 8)
    return list(largest.values())

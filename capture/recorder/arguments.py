"""A call's arguments in the shard's form, described in Python: for the dispatch mode."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import torch
from torch._subclasses.fake_tensor import FakeTensor

from kcap.schemas.recording.dtypes import BY_NAME

ALL = -1  # every argument's bit
SMALL = 16  # integers below it may be dimensions
PATH_NUMBER = re.compile(r"\.\d+")
MADE_BY_COMPILER = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Described:
    """A call: its operator, whether it does work, its parent, its arguments as JSON and as they came.

    `external`: it did not come through the dispatcher. `region`: it is no kernel, whatever runs in it.
    """

    operator: str
    work: bool
    parent: str | None
    args: list[dict[str, Any]]
    values: list[tuple[str, Any]]
    launch: dict[str, Any] | None = None
    external: bool = False
    region: bool = False

    def line(self, scalars: int, offsets: int) -> bytes:
        """The call's line without its id; a bit an argument says which scalars and which offsets to leave out."""
        args = [_masked(arg, scalars >> i & 1, offsets >> i & 1) for i, arg in enumerate(self.args)]
        body: dict[str, Any] = {"operator": self.operator}
        if self.parent:
            body["parent"] = self.parent
        if self.region:
            body["kind"] = "region"
        if not self.work:
            body["work"] = False
        if self.launch is not None:
            body["launch"] = self.launch
        return orjson.dumps({**body, "args": args}) + b"\n"

    def rounded(self) -> bytes:
        """Equal for calls whose numbers and sizes lie between the same powers of two, wherever their tensors begin."""
        launch = {name: value for name, value in (self.launch or {}).items() if name != "grid"}
        args = [{**arg, "value": _rounded(_without_offsets(arg["value"]))} for arg in self.args]
        return orjson.dumps([self.operator, self.parent, self.region, launch, args])

    def drifted(self, scalars: int, offsets: int) -> tuple[dict[str, Any], dict[str, int]]:
        """What `line` leaves out, by the arguments' numbers."""
        numbered = [(i, str(i), arg["value"]) for i, arg in enumerate(self.args)]
        return (
            {name: value for i, name, value in numbered if scalars >> i & 1},
            {
                path: offset
                for i, name, value in numbered
                if offsets >> i & 1
                for path, offset in _offsets_of(value, name)
            },
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return (math.frexp(value)[1], value > 0) if value else value
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) < SMALL:
        return value
    return [(abs(value) - 1).bit_length(), value > 0]


def holds_scalar(arg: dict[str, Any]) -> bool:
    value = arg["value"]
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, bool | int | float) for item in items)


def _masked(arg: dict[str, Any], scalar: int, offset: int) -> dict[str, Any]:
    if scalar and holds_scalar(arg):
        return {**{key: item for key, item in arg.items() if key != "default"}, "value": {"drift": "number"}}
    return {**arg, "value": _without_offsets(arg["value"])} if offset else arg


def _offsets_of(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Where each tensor of an argument begins in its storage."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _offsets_of(item, f"{path}.{index}")
    elif isinstance(value, dict) and "tensor" in value:
        yield path, value["tensor"].get("offset", 0)


def _without_offsets(value: Any) -> Any:
    """The value with its offsets left out; equal values give equal bytes."""
    if isinstance(value, list):
        return [_without_offsets(item) for item in value]
    if isinstance(value, dict) and "tensor" in value:
        rest = {name: member for name, member in value["tensor"].items() if name != "offset"}
        return {"tensor": {**rest, "offset": None}}
    return value


def is_traced(args: Any, kwargs: Any) -> bool:
    """Whether a compiler made this call: it is tracing, or the call holds a fake or meta tensor or a symbolic size."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, MADE_BY_COMPILER) or _is_meta(leaf) for leaf in leaves)


def _is_meta(leaf: Any) -> bool:
    return (isinstance(leaf, torch.Tensor) and leaf.is_meta) or (isinstance(leaf, torch.device) and leaf.type == "meta")


def describe(func: Any, args: Any, kwargs: Any, parent: str | None) -> Described:
    """Bind the arguments to the operator's schema, defaults filled in, and write them down."""
    schema = func._schema
    storages: dict[int, int] = {}
    values, described = [], []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        values.append((argument.name, value))
        described.append(_argument(argument, value, storages))
    return Described(operator_name(schema), _does_work(func), parent, described, values)


def operator_name(schema: Any) -> str:
    """`aten::add.Tensor`."""
    return str(schema.name) + (f".{schema.overload_name}" if schema.overload_name else "")


def describe_values(
    name: str,
    names: Sequence[str],
    values: Sequence[Any],
    work: bool,
    parent: str | None,
    launch: dict[str, Any] | None,
    region: bool = False,
) -> Described:
    """A call that has no schema: the names of its parameters and their values."""
    storages: dict[int, int] = {}
    pairs = list(zip(names, values, strict=True))
    args = [{"name": argument, "value": encode(value, storages)} for argument, value in pairs]
    return Described(name, work, parent, args, pairs, launch, external=True, region=region)


def _argument(argument: Any, value: Any, storages: dict[int, int]) -> dict[str, Any]:
    out = {"name": argument.name, "value": encode(value, storages, str(argument.real_type))}
    if argument.kwarg_only:
        out["keyword"] = True
    if argument.alias_info is not None and argument.alias_info.is_write:
        out["written"] = True
    if argument.has_default_value() and not isinstance(value, torch.Tensor) and value == argument.default_value:
        out["default"] = True
    return out


@cache
def _does_work(func: Any) -> bool:
    if torch.Tag.inplace_view in func.tags:  # it changes a tensor's shape or strides
        return False
    schema = func._schema
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info]
    written = any(alias.is_write for alias in aliases)
    view = bool(aliases) and not written and any(result.alias_info for result in schema.returns)
    return not view and "empty" not in schema.name and schema.name not in ("aten::detach", "aten::alias")


def encode(value: Any, storages: dict[int, int], real_type: str = "") -> Any:
    """The shard's form of one argument (that of kcap.schemas.recording.values)."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, storages)
    if isinstance(value, list | tuple):
        return [encode(item, storages, real_type) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": name} if (name := dtype_name(value)) in BY_NAME else {"opaque": "dtype"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return value
    if isinstance(value, str):
        return {"folded": PATH_NUMBER.sub(".*", value)} if PATH_NUMBER.search(value) else value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"opaque": type(value).__name__}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has sizes, strides and a storage, which holds its numbers as they are."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def dtype_name(dtype: torch.dtype) -> str:
    """torch's, without the module's."""
    return str(dtype).removeprefix("torch.")


def _unusual_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "conjugated" if tensor.is_conj() else "negated" if tensor.is_neg() else str(tensor.layout)


def _tensor(tensor: torch.Tensor, storages: dict[int, int]) -> Any:
    if not is_plain(tensor):
        return {"opaque": f"tensor {_unusual_kind(tensor)}"}
    if (dtype := dtype_name(tensor.dtype)) not in BY_NAME:
        return {"opaque": f"tensor {dtype}"}
    storage = tensor.untyped_storage()._cdata
    out: dict[str, Any] = {"shape": list(tensor.shape), "dtype": dtype}
    if not tensor.is_contiguous():
        out["strides"] = list(tensor.stride())
    if tensor.storage_offset():
        out["offset"] = tensor.storage_offset()
    return {"tensor": {**out, "device": tensor.device.type, "storage": storages.setdefault(storage, len(storages))}}

"""Rebuild a Call's arguments: one buffer per storage, each tensor a view with its shape, strides and offset."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from kcap.replay.bind import Bound
from kcap.replay.fill import fill_floats, fill_integers
from kcap.replay.layout import Target, key_of, tensor, torch_dtype
from kcap.replay.memory import Key, place, plan
from kcap.replay.skip import Skip
from kcap.schemas.values import Folded, Group, Opaque, TensorSpec, TorchConstant, Value

NONE: Mapping[Key, torch.Tensor] = MappingProxyType({})


@dataclass
class Inputs:
    """The arguments of one invocation. `keep` holds what they point into and torch does not know of."""

    args: list[Any]
    kwargs: dict[str, Any]
    buffers: dict[Key, torch.Tensor]
    keep: list[Any] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer) for buffer in self.buffers.values())


def build(bound: Bound, target: Target, given: Mapping[Key, torch.Tensor] = NONE) -> Inputs:
    """Allocate and fill the arguments of `bound`; torch's default generators draw the numbers.

    `given`: buffers to take for some storages, at least as large as they are; they are filled anew.
    """
    sizes = plan(bound, target.device, target.home)
    pins = pinned(bound, target)
    buffers = {key: given[key] if key in given else empty(n, key[0], pins).zero_() for key, n in sizes.items()}
    fill_floats(bound, target, buffers)
    inputs = view(bound, target, buffers)
    fill_integers(bound, target, buffers)
    return inputs


def clone(bound: Bound, target: Target, source: Inputs, moved: Collection[Key] | None = None) -> Inputs:
    """The same arguments with the same content at other addresses: all, or the storages `moved`."""
    pins = pinned(bound, target)
    buffers = dict(source.buffers)
    for key in buffers if moved is None else moved:
        buffers[key] = empty(len(buffers[key]), key[0], pins).copy_(buffers[key])
    return view(bound, target, buffers)


def pinned(bound: Bound, target: Target) -> bool:
    """Whether host memory is pinned: only then is a copy to or from the GPU asynchronous, as the Call asked for."""
    return target.device.startswith("cuda") and bound["non_blocking"] is True


def empty(size: int, device: str, pins: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pins and device == "cpu")


def view(bound: Bound, target: Target, buffers: dict[Key, torch.Tensor]) -> Inputs:
    """The arguments over `buffers`, as the schema takes them: positional, then keyword-only ones."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in bound.args:
        value = rebuild(argument.value, argument.name, target, buffers)
        if argument.keyword and argument.name:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Inputs(args, kwargs, buffers)


def rebuild(value: Value, name: str | None, target: Target, buffers: dict[Key, torch.Tensor]) -> Any:
    """The Python object that `value` stands for."""
    match value:
        case TensorSpec():
            return tensor(value, buffers[key_of(value, target)])
        case list():
            return [rebuild(item, name, target, buffers) for item in value]
        case TorchConstant():
            return constant(value, target)
        case Folded(pattern=pattern):
            raise Skip(f"its argument '{name}' names a layer of the engine ({pattern})")
        case Opaque(type=kind):
            raise Skip(f"its argument '{name}' is opaque ({kind})")
        case Group(size=size):
            raise Skip(f"it needs its process group (of {size})")
        case str() if name == "device":  # a trace file writes a device as a string, too
            return constant(TorchConstant("device", value), target)
    return value


MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")


def constant(value: TorchConstant, target: Target) -> Any:
    """The torch object that a word names; a device is moved as the tensors on it are."""
    if value.kind == "dtype":
        return torch_dtype(value.name)
    if value.kind == "device":
        return torch.device(place(value.name, target.device, target.home) if value.name != "meta" else "meta")
    known = MEMORY_FORMATS if value.kind == "memory_format" else LAYOUTS
    if value.name not in known:
        raise Skip(f"torch has no {value.kind} {value.name[:40]!r}")
    return getattr(torch, value.name)

"""Rebuild a Call's arguments: one buffer per storage, each tensor a view with its shape, strides and offset.

Floats are standard normal numbers in the recorded dtype; large buffers repeat one block of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kcap.replay.bind import Bound
from kcap.replay.memory import Key, place, plan
from kcap.replay.skip import Skip
from kcap.schemas.dtypes import BY_NAME
from kcap.schemas.values import Folded, Opaque, TensorSpec, TorchConstant, Value

BLOCK = 1 << 22  # elements drawn for a large buffer; the rest are copies
UNIT = frozenset({"multinomial", "bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward"})  # take 0..1


@dataclass
class Inputs:
    """The arguments of one invocation. `keep` holds what they point into and torch does not know of."""

    args: list[Any]
    kwargs: dict[str, Any]
    buffers: dict[Key, torch.Tensor]
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """Where to rebuild: tensors recorded on `home` (`cuda` or `cpu`) go to `device`."""

    device: str
    home: str


def build(bound: Bound, target: Target) -> Inputs:
    """Allocate and fill the arguments of `bound`; torch's default generators draw the numbers."""
    sizes = plan(bound, target.device, target.home)
    buffers = {key: torch.zeros(n, dtype=torch.uint8, device=key[0]) for key, n in sizes.items()}
    unit = bound.namespace == "aten" and bound.base in UNIT
    fill_floats(bound, target, buffers, unit)
    inputs = view(bound, target, buffers)
    fill_integers(bound, target, buffers)
    return inputs


def clone(bound: Bound, target: Target, source: Inputs) -> Inputs:
    """The same arguments with the same content at other addresses."""
    return view(bound, target, {key: buffer.clone() for key, buffer in source.buffers.items()})


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
            return tensor(value, buffers[_key(value, target)])
        case list():
            return [rebuild(item, name, target, buffers) for item in value]
        case TorchConstant():
            return constant(value, target)
        case Folded(pattern=pattern):
            raise Skip(f"its argument '{name}' names a layer of the engine ({pattern})")
        case Opaque(type=kind):
            raise Skip(f"its argument '{name}' is opaque ({kind})")
        case str() if name == "device":  # a trace file writes a device as a string, too
            return constant(TorchConstant("device", value), target)
    return value


def tensor(spec: TensorSpec, buffer: torch.Tensor) -> torch.Tensor:
    """A view of `buffer` (bytes of a whole storage) with the shape, strides, offset and dtype of `spec`."""
    return buffer.view(torch_dtype(spec.dtype)).as_strided(spec.shape, spec.effective_strides, spec.offset or 0)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name; Skip if this torch has none."""
    found = getattr(torch, name, None) if name in BY_NAME else None
    if not isinstance(found, torch.dtype):
        raise Skip(f"torch {torch.__version__} has no dtype {name}")
    return found


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


def fill_floats(bound: Bound, target: Target, buffers: dict[Key, torch.Tensor], unit: bool) -> None:
    """Fill every storage that holds floats, once; then booleans, tensor by tensor."""
    done: set[Key] = set()
    specs = [(spec, _key(spec, target), BY_NAME[spec.dtype].kind) for _, spec in bound.tensors()]
    for spec, key, kind in specs:
        if kind in ("float", "complex") and key not in done:
            done.add(key)
            draw(buffers[key], spec.dtype, unit)
    for spec, key, kind in specs:
        if kind == "bool" and spec.numel:
            write(tensor(spec, buffers[key]), torch.randint(0, 2, compact(spec), dtype=torch.bool))


def _key(spec: TensorSpec, target: Target) -> Key:
    return place(spec.device, target.device, target.home), spec.storage


def compact(spec: TensorSpec) -> tuple[int, ...]:
    """The shape without the copies that a stride of zero makes of one element."""
    return tuple(1 if step == 0 else n for n, step in zip(spec.shape, spec.effective_strides, strict=True))


def draw(buffer: torch.Tensor, dtype: str, unit: bool = False) -> None:
    """Overwrite the whole buffer (bytes) with random numbers of `dtype`; `unit` takes them from [0, 1)."""
    low, high = {"float4_e2m1fn_x2": (0, 256), "float8_e8m0fnu": (120, 131)}.get(dtype, (0, 0))  # e8m0: 127 is 2**0
    if high:
        size = (min(BLOCK, len(buffer)),)
        repeat(buffer, torch.randint(low, high, size, dtype=torch.uint8, device=buffer.device))
        return
    cells = _real_view(buffer, dtype)
    block = torch.rand if unit else torch.randn
    repeat(cells, block(min(BLOCK, len(cells)), device=cells.device).to(cells.dtype))


def _real_view(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """`buffer` as real numbers: a complex number is two of them."""
    halves = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}
    return buffer.view(halves.get(dtype) or torch_dtype(dtype))


def repeat(cells: torch.Tensor, block: torch.Tensor) -> None:
    """Fill the flat `cells` with copies of `block`."""
    for start in range(0, len(cells), len(block)):
        part = cells[start : start + len(block)]
        part.copy_(block[: len(part)])


def fill_integers(bound: Bound, target: Target, buffers: dict[Key, torch.Tensor]) -> None:
    """Write the decided values; a tensor larger than its values (unused rows were not kept) is zero elsewhere."""
    for path, spec in bound.integers():
        if (values := bound.contents.get(path)) is None:
            continue
        write(tensor(spec, buffers[_key(spec, target)]), values)


def write(made: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into the leading part of `made`, element by element where strides repeat (stride 0)."""
    if values.numel() == 1 and made.numel() >= 1:
        values = values.reshape([1] * made.dim())
    if values.dim() != made.dim():
        raise Skip(f"the recorded values have shape {list(values.shape)}, the tensor {list(made.shape)}")
    single = [1 if step == 0 else n for n, step in zip(made.shape, made.stride(), strict=True)]
    cut = [min(a, b) for a, b in zip(single, values.shape, strict=True)]
    region = made
    for dim, n in enumerate(cut):
        region = region.narrow(dim, 0, n)
        values = values.narrow(dim, 0, n)
    region.copy_(values)

"""A Call's arguments in memory: one buffer for each storage, each tensor a view with its shape, strides and offset.

Sizes are in bytes, and computed before anything is allocated. Tensors hold standard normal numbers in the recorded
dtype, recorded values or drawn indices; large buffers repeat one block of numbers.
"""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kcap.schemas.derive.bound_call import BoundCall, Inputs, Skip, StorageKey, fill_random
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.values import Folded, Opaque, TensorSpec, TorchConstant, Value
from kcap.system.memory import GIB, free_memory

BUFFER_ALIGN = 64  # every buffer's size is a multiple of this, so that any dtype can view it
SHARE_OF_FREE = 0.8  # of the free memory, which the outputs need too


def end_byte(spec: TensorSpec) -> int:
    """One past the last byte of its storage that the tensor reaches."""
    return math.ceil(((spec.offset or 0) + spec.extent) * spec.bits / 8)


def buffer_sizes(bound: BoundCall, device: str, home: str) -> dict[StorageKey, int]:
    """The size of each storage: one buffer holds all tensors that share it."""
    return {key: max(-(-n // BUFFER_ALIGN), 1) * BUFFER_ALIGN for key, n in reached_bytes(bound, device, home).items()}


def reached_bytes(bound: BoundCall, device: str, home: str) -> dict[StorageKey, int]:
    """How far into each storage the tensors on it reach."""
    reached: dict[StorageKey, int] = {}
    for _, spec in bound.tensors():
        key = (target_device(spec.device, device, home), spec.storage)
        reached[key] = max(reached.get(key, 0), end_byte(spec))
    return reached


def target_device(recorded_on: str, device: str, home: str) -> str:
    """The device of a rebuilt tensor: `device` for one recorded on the type `home`, the CPU for any other."""
    return device if recorded_on.split(":")[0] == home else "cpu"


def check_free(sizes: dict[StorageKey, int], mapped: Collection[StorageKey], extra: int, device: str) -> int:
    """The bytes of one set of inputs; Skip if a device has no room for them. `mapped`: those that lie on the host."""
    places = {key: "cpu" if key in mapped else key[0] for key in sizes}
    for target in {*places.values(), device}:
        needed = sum(n for key, n in sizes.items() if places[key] == target) + (extra if target == device else 0)
        available = free_bytes(target)
        if needed > available * SHARE_OF_FREE:
            raise Skip(f"needs {_gib(needed)} GiB, {_gib(available)} free on {target}")
        if target.startswith("cuda") and needed > torch.cuda.mem_get_info(target)[0]:
            torch.cuda.empty_cache()
    return sum(sizes.values()) + extra


def _gib(count: int) -> str:
    return f"{count / GIB:.3g}"


def free_bytes(device: str) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.startswith("cuda"):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return free_memory()


def return_unused_memory(device: str) -> None:
    """Return the unused memory of torch's pools to the GPU, if that is most of its free memory.

    A capture that runs out of memory cannot take it from another graph's pool.
    """
    if torch.cuda.mem_get_info(device)[0] < free_bytes(device) // 2:
        torch.cuda.empty_cache()


def limit_host_memory(limit_bytes: int | None = None) -> None:
    """Limit what this process may still allocate to `limit_bytes` (None: most of the machine's free memory).

    Beyond it allocations raise, instead of the kernel's OOM killer ending this process or another.
    """
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    used = int(match[1]) * 1024 if match else 0
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + (int(free_bytes("cpu") * 0.9) if limit_bytes is None else limit_bytes)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@dataclass(frozen=True)
class Target:
    """Where to rebuild: tensors recorded on the type `home` (`cuda` or `cpu`) go to `device`."""

    device: str
    home: str


def storage_key(spec: TensorSpec, target: Target) -> StorageKey:
    return target_device(spec.device, target.device, target.home), spec.storage


def tensor_view(spec: TensorSpec, buffer: torch.Tensor) -> torch.Tensor:
    """A view of `buffer` (bytes of a whole storage) with the shape, strides, offset and dtype of `spec`."""
    return buffer.view(torch_dtype(spec.dtype, Skip)).as_strided(spec.shape, spec.effective_strides, spec.offset or 0)


def compact_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape, with 1 for each dimension that repeats its elements by a stride of zero."""
    return tuple(1 if step == 0 else n for n, step in zip(spec.shape, spec.effective_strides, strict=True))


NO_BUFFERS: Mapping[StorageKey, torch.Tensor] = MappingProxyType({})


def build_inputs(
    bound: BoundCall, target: Target, preallocated: Mapping[StorageKey, torch.Tensor] = NO_BUFFERS
) -> Inputs:
    """Allocate and fill the arguments of `bound`; torch's default generators draw the numbers.

    `preallocated`: buffers for some storages, at least of their size; they are filled anew.
    """
    sizes = buffer_sizes(bound, target.device, target.home)
    empty = Allocator(bound, target)
    buffers = {
        key: preallocated[key] if key in preallocated else empty.buffer(key, n).zero_() for key, n in sizes.items()
    }
    fill_floats(bound, target, buffers)
    inputs = inputs_on_buffers(bound, target, buffers)
    write_contents(bound, target, buffers)
    return inputs


def clone_inputs(
    bound: BoundCall, target: Target, source: Inputs, storages: Collection[StorageKey] | None = None
) -> Inputs:
    """The same arguments with the same content at other addresses: all storages, or those named.

    Mapped ones stay where they are: no cache of the GPU holds them.
    """
    empty = Allocator(bound, target)
    buffers = dict(source.buffers)
    for key in buffers if storages is None else storages:
        if key not in empty.mapped:
            buffers[key] = empty.buffer(key, len(buffers[key])).copy_(buffers[key])
    return inputs_on_buffers(bound, target, buffers)


class Allocator:
    """Allocates each storage of `bound` where its memory was: the GPU's, the host's, or the host's that a GPU reaches.

    The host's is pinned where a copy must be asynchronous, as the Call asked for.
    """

    def __init__(self, bound: BoundCall, target: Target) -> None:
        self.pins = target.device.startswith("cuda") and bound["non_blocking"] is True
        self.mapped = mapped_storages(bound, target)

    def buffer(self, key: StorageKey, size: int) -> torch.Tensor:
        """Bytes, uint8 [size], not filled."""
        device, _ = key
        if key in self.mapped:
            return torch.as_tensor(MappedMemory(size), device=device)
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=self.pins and device == "cpu")


def mapped_storages(bound: BoundCall, target: Target) -> frozenset[StorageKey]:
    """Those in the host's memory that the GPU reaches where it is; none where there is no GPU."""
    keys = (storage_key(spec, target) for _, spec in bound.tensors() if spec.mapped)
    return frozenset(key for key in keys if key[0].startswith("cuda"))


class MappedMemory:
    """Pinned memory of the host, which torch takes for an array on the GPU."""

    def __init__(self, size: int) -> None:
        self.held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        place = (self.held.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": place, "version": 3}


def inputs_on_buffers(bound: BoundCall, target: Target, buffers: dict[StorageKey, torch.Tensor]) -> Inputs:
    """The arguments as views of `buffers`, as the schema takes them: positional, then keyword-only ones."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in bound.args:
        value = rebuild_value(argument.value, argument.name, target, buffers)
        if argument.keyword and argument.name:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Inputs(args, kwargs, buffers)


def rebuild_value(value: Value, name: str | None, target: Target, buffers: dict[StorageKey, torch.Tensor]) -> Any:
    """The Python object that `value` stands for."""
    match value:
        case TensorSpec():
            return tensor_view(value, buffers[storage_key(value, target)])
        case list():
            return [rebuild_value(item, name, target, buffers) for item in value]
        case TorchConstant():
            return torch_constant(value, target)
        case Folded(pattern=pattern):
            raise Skip(f"its argument '{name}' names a layer of the engine ({pattern})")
        case Opaque(type="Generator"):  # whose state was not recorded: the device's own draws
            return None
        case Opaque(type=kind):
            raise Skip(f"its argument '{name}' is opaque ({kind})")
        case str() if name == "device":  # a trace file writes a device as a string, too
            return torch_constant(TorchConstant("device", value), target)
    return value


MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
TENSOR_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")


def torch_constant(value: TorchConstant, target: Target) -> Any:
    """The torch object of this name; a device is replaced as those of tensors are."""
    if value.kind == "dtype":
        return torch_dtype(value.name, Skip)
    if value.kind == "device":
        return torch.device(target_device(value.name, target.device, target.home) if value.name != "meta" else "meta")
    names = MEMORY_FORMATS if value.kind == "memory_format" else TENSOR_LAYOUTS
    if value.name not in names:
        raise Skip(f"torch has no {value.kind} {value.name[:40]!r}")
    return getattr(torch, value.name)


UNIT_INTERVAL_OPERATORS = frozenset(  # they take numbers from 0 to 1
    {"multinomial", "bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward"}
)


def fill_floats(bound: BoundCall, target: Target, buffers: dict[StorageKey, torch.Tensor]) -> None:
    """Fill every storage that holds floats, once; then booleans, tensor by tensor."""
    unit = bound.namespace == "aten" and bound.base in UNIT_INTERVAL_OPERATORS
    filled: set[StorageKey] = set()
    specs = [(spec, storage_key(spec, target), BY_NAME[spec.dtype].kind) for _, spec in bound.tensors()]
    for spec, key, kind in specs:
        if kind in ("float", "complex") and key not in filled:
            filled.add(key)
            fill_random(buffers[key], spec.dtype, unit)
    for spec, key, kind in specs:
        if kind == "bool" and spec.numel:
            write_leading(tensor_view(spec, buffers[key]), torch.randint(0, 2, compact_shape(spec), dtype=torch.bool))


def write_contents(bound: BoundCall, target: Target, buffers: dict[StorageKey, torch.Tensor]) -> None:
    """Write the values that were recorded, or that a replay rule set.

    An integer tensor larger than its values (unused rows were not kept) is zero elsewhere.
    """
    for path, spec in bound.tensors():
        if (values := bound.contents.get(path)) is None:
            continue
        write_leading(tensor_view(spec, buffers[storage_key(spec, target)]), values)


def write_leading(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into the leading part of `made`, element by element where strides repeat (stride 0)."""
    if values.numel() == 1 and target.numel() >= 1:
        values = values.reshape([1] * target.dim())
    if values.dim() != target.dim():
        raise Skip(f"the recorded values have shape {list(values.shape)}, the tensor {list(target.shape)}")
    sizes = [1 if step == 0 else n for n, step in zip(target.shape, target.stride(), strict=True)]
    extents = [min(a, b) for a, b in zip(sizes, values.shape, strict=True)]
    region = target
    for dim, n in enumerate(extents):
        region = region.narrow(dim, 0, n)
        values = values.narrow(dim, 0, n)
    region.copy_(values)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in logical order, whatever its strides: uint8, [nbytes]."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8)

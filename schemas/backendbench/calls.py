"""The few functions that serialized arguments may name, `T(…)` first: each makes a Value.

Sizes are checked here, before anything allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kcap.schemas.backendbench.lexer import DEVICE
from kcap.schemas.backendbench.line import MAX_NUMEL, MAX_TENSOR_BYTES
from kcap.schemas.recording.values import Opaque, TensorSpec, TorchConstant, Value, contiguous_strides

DEVICE_OF_TENSORS = "cuda"
NAMES = ("shape", "dtype", "stride", "device")
MAX_SIZE = 2**63 - 1
MAX_DIMENSIONS = 64


def tensor(positional: list[Value], keywords: dict[str, Value], storage: int) -> TensorSpec:
    """The TensorSpec that a `T(…)` with these arguments means; ValueError says what is wrong with it."""
    if len(positional) > len(NAMES):
        raise ValueError("T takes a shape, a dtype, a stride and a device")
    values = dict(zip(NAMES, positional, strict=False))
    keywords = {"shape" if name == "size" else name: value for name, value in keywords.items()}
    if wrong := [name for name in keywords if name in values or name not in NAMES]:
        raise ValueError(f"T does not take {wrong[0][:40]} here")
    return _checked_tensor(values | keywords, storage)


def _checked_tensor(values: dict[str, Value], storage: int) -> TensorSpec:
    dtype = values.get("dtype")
    if not isinstance(dtype, TorchConstant) or dtype.kind != "dtype":
        raise ValueError("a tensor needs a dtype: f32, bf16, torch.float16, …")
    shape = _tensor_sizes(values.get("shape"), "shape")
    stride = None if values.get("stride") is None else _tensor_sizes(values["stride"], "stride")
    spec = TensorSpec(shape, dtype.name, stride, device=_tensor_device(values.get("device")), storage=storage)
    return canonical(check_tensor(spec))


def _tensor_sizes(value: Value, what: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(f"a tensor's {what} is a list of integers from 0 to 2**63 - 1")
    return tuple(size for size in sizes if type(size) is int)


def _tensor_device(value: Value) -> str:
    name = value.name if isinstance(value, TorchConstant) and value.kind == "device" else value
    if name is None:
        return DEVICE_OF_TENSORS
    if not isinstance(name, str) or not DEVICE.fullmatch(name):
        raise ValueError("a tensor's device is a string such as 'cuda:0'")
    return name


def canonical(spec: TensorSpec) -> TensorSpec:
    """The same tensor with `strides` None where it is contiguous."""
    if spec.strides is None or spec.strides != contiguous_strides(spec.shape):
        return spec
    return TensorSpec(spec.shape, spec.dtype, None, spec.offset, spec.device, spec.storage)


def check_tensor(spec: TensorSpec) -> TensorSpec:
    """`spec`, if some device could hold it."""
    if len(spec.shape) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
    if spec.strides is not None and len(spec.strides) != len(spec.shape):
        raise ValueError("a tensor's shape and stride differ in length")
    if math.prod(spec.shape) > MAX_NUMEL:
        raise ValueError("a tensor of more than 2**62 elements")
    if spec.extent * spec.bits > MAX_TENSOR_BYTES * 8:
        raise ValueError(f"a tensor of more than {MAX_TENSOR_BYTES >> 40} TiB")
    return spec


Keywords = dict[str, Value]


def _tensor(positional: list[Value], keywords: Keywords, source: str, storage: int) -> TensorSpec:
    return tensor(positional, keywords, storage)


def _opaque(positional: list[Value], keywords: Keywords, source: str, storage: int) -> Opaque:
    return Opaque(source)


def _float(positional: list[Value], keywords: Keywords, source: str, storage: int) -> float:
    if keywords or len(positional) != 1 or positional[0] not in ("inf", "-inf", "nan", "Infinity", "-Infinity", "NaN"):
        raise ValueError("float takes 'inf', '-inf' or 'nan' here")
    return float(str(positional[0]))


def _complex(positional: list[Value], keywords: Keywords, source: str, storage: int) -> complex:
    parts = [float(part) for part in positional if isinstance(part, int | float)]
    if keywords or not len(parts) == len(positional) == 2:
        raise ValueError("complex takes two numbers here")
    return complex(*parts)


def _device(positional: list[Value], keywords: Keywords, source: str, storage: int) -> TorchConstant:
    values = dict(zip(("type", "index"), positional, strict=False)) | keywords
    kind, index = values.pop("type", None), values.pop("index", None)
    name = kind if index is None else f"{kind}:{index}"
    if values or len(positional) > 2 or not isinstance(name, str) or not DEVICE.fullmatch(name):
        raise ValueError("a device is written torch.device('cuda:0')")
    return TorchConstant("device", name)


CALLS: dict[str, Callable[[list[Value], Keywords, str, int], Value]] = {
    "T": _tensor,
    "ST": _opaque,
    "torch.randint": _opaque,
    "th.randint": _opaque,
    "float": _float,
    "complex": _complex,
    "torch.device": _device,
    "th.device": _device,
    "device": _device,
}

OPAQUE = ("ST(", "torch.randint(", "th.randint(")

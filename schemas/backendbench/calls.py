"""The few functions that serialized arguments may name. Each makes a Value; none does anything."""

from __future__ import annotations

from collections.abc import Callable

from kcap.schemas.backendbench.tensor import tensor
from kcap.schemas.backendbench.words import DEVICE
from kcap.schemas.values import Opaque, TensorSpec, TorchConstant, Value

Keywords = dict[str, Value]


class Fault(ValueError):
    """What is wrong with a text, and where in it."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


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
    given = dict(zip(("type", "index"), positional, strict=False)) | keywords
    kind, index = given.pop("type", None), given.pop("index", None)
    name = kind if index is None else f"{kind}:{index}"
    if given or len(positional) > 2 or not isinstance(name, str) or not DEVICE.fullmatch(name):
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

"""Whether an invocation is exactly as a recorded Call: what a Solution was judged for, and nothing beside it; whether
an engine is the one that a plan was made for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kcap.schemas.recording.records import Call
from kcap.schemas.recording.values import Drift, Folded, Group, Opaque, TensorSpec, TorchConstant, Value
from kcap.schemas.results.plan import Plan

Values: TypeAlias = "Mapping[str, Any]"  # arguments by their paths in the Call (`"3"`, `"2.1"`)
ALIGNMENT = 16  # bytes, of every tensor: what is judged is aligned by more
NOTHING: Mapping[str, Collection[int]] = {}
MARKS = (Drift, Folded, Opaque, Group)  # of values that are not known


def with_items(path: str, value: Any) -> dict[str, Any]:
    """The argument at `path` and, of a list, its items."""
    if not isinstance(value, list | tuple):
        return {path: value}
    return {path: value} | {f"{path}.{place}": item for place, item in enumerate(value)}


class Matching:
    """What an invocation of `call` looks like. Values that the Call does not know may be anything, and so may the
    arguments `hints`, by path, and the sizes of the dimensions `free`, by argument."""

    def __init__(self, call: Call, free: Mapping[str, Collection[int]] = NOTHING, hints: Collection[str] = ()) -> None:
        self._free = free
        tensors = [(path, spec) for path, spec in call.tensors() if path.partition(".")[0] not in hints]
        self._tensors = [
            (
                path,
                torch.Size(spec.shape),
                spec.effective_strides,
                getattr(torch, spec.dtype),
                spec.device.split(":")[0],
            )
            for path, spec in tensors
        ]
        self._storages = [
            (path, spec.storage, None if spec.offset is None else spec.offset * spec.bits // 8, spec.numel)
            for path, spec in tensors
        ]
        self._plain = [
            (str(index), argument.value)
            for index, argument in enumerate(call.args)
            if _is_known(argument.value) and str(index) not in hints
        ]
        self._constants = dict(call.launch.constexprs) if call.launch else {}

    def mismatch(self, values: Values, constants: Mapping[str, Any] | None = None) -> str:
        """The first thing in which an invocation is not as the Call; "" if there is none.

        `constants`: of a Triton launch, its constexprs by name.
        """
        for path, shape, strides, dtype, device in self._tensors:
            tensor = values.get(path)
            if not isinstance(tensor, torch.Tensor):
                return f"argument {path}: no tensor"
            if tensor.shape != shape and not self._differs_as_it_may(path, tensor.shape, shape):
                return f"argument {path}: shape"
            if tensor.dtype != dtype or tensor.device.type != device:
                return f"argument {path}: dtype or device"
            if tensor.stride() != strides and not _same_layout(shape, tensor.stride(), strides):
                return f"argument {path}: strides"
            if tensor.data_ptr() % ALIGNMENT:
                return f"argument {path}: not aligned to {ALIGNMENT} bytes"
        for path, value in self._plain:
            if not _same(values.get(path), value):
                return f"argument {path}: value"
        if constants is not None:
            for name, value in self._constants.items():
                if not _same(constants.get(name), value):
                    return f"constant {name}: value"
        return "" if self._shared_alike(values) else "which tensors share their memory"

    def _differs_as_it_may(self, path: str, found: torch.Size, recorded: torch.Size) -> bool:
        free = self._free.get(path)
        return (
            free is not None
            and len(found) == len(recorded)
            and all(a == b or dim in free for dim, (a, b) in enumerate(zip(found, recorded, strict=True)))
        )

    def _shared_alike(self, values: Values) -> bool:
        """Whether the same tensors share their memory, as far apart in it as they did.

        Those of other sizes, which may be free, are as many times as far apart as they are larger: keys' and values'
        pages, one after the other, in a cache that has more of them.
        """
        found: dict[int, int] = {}
        starts: dict[int, int] = {}
        for path, number, offset, elements in self._storages:
            address = values[path].untyped_storage().data_ptr()
            if found.setdefault(number, address) != address:
                return False
            if offset is not None and values[path].numel():
                offset = offset * values[path].numel() // elements if elements else offset
                start = values[path].data_ptr() - offset
                if starts.setdefault(number, start) != start:
                    return False
        addresses = [address for address in found.values() if address]
        return len(set(addresses)) == len(addresses)


def _same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides differ in dimensions of one element alone, where they mean nothing."""
    return all(size <= 1 or x == y for size, x, y in zip(shape, a, b, strict=True))


def _is_known(value: Value) -> bool:
    """Whether all of it is plain: no tensor, and nothing that changes or cannot be written down."""
    if isinstance(value, list):
        return all(map(_is_known, value))
    return not isinstance(value, (TensorSpec, *MARKS)) and not (
        isinstance(value, TorchConstant) and value.kind == "device"
    )


def _same(value: Any, recorded: Value) -> bool:
    if isinstance(recorded, list):
        return isinstance(value, list | tuple) and len(value) == len(recorded) and all(map(_same, value, recorded))
    if isinstance(recorded, TorchConstant):
        return str(getattr(value, "name", None) or value).removeprefix("torch.") == recorded.name
    if isinstance(value, torch.Tensor):
        return False
    return type(value) is type(recorded) and value == recorded


class PlanRefused(Exception):
    """This engine cannot hold the plan. It does not start, for it would silently be the engine's own."""


def check_engine(plan: Plan, facts: Mapping[str, Any]) -> None:
    """PlanRefused where the plan was made for another engine, another release of it, another model, or another GPU."""
    for what, made_for, found in _differences(plan, facts):
        raise PlanRefused(f"it was made for {what} {made_for}, and this is {found}: record, judge and apply anew here")


def _differences(plan: Plan, facts: Mapping[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    for what, made_for in (("framework", plan.framework), ("framework_version", plan.framework_version)):
        if made_for and facts.get(what) and made_for != facts[what]:
            yield what.replace("_", " "), made_for, facts[what]
    if plan.model and facts.get("model") and model_name(plan.model) != model_name(facts["model"]):
        yield "the model", plan.model, facts["model"]
    if plan.machine.device == "cuda":
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        if plan.machine.device_name and found not in plan.machine.device_name.split(", "):
            yield "the device", plan.machine.device_name, found


def model_name(model: str) -> str:
    """Of a model that is named by its id or by its folder, in the hub's cache or elsewhere: what both end with."""
    parts = Path(model).parts
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return (cached or parts or ("",))[-1].casefold()

"""Calls, requests and values written by hand."""

from __future__ import annotations

import hashlib

import orjson
import torch
from safetensors.torch import save

from kcap.schemas.recording.recording import Argument, Call, Count, SampledTensor
from kcap.schemas.recording.values import TensorSpec, Value


def call(operator: str, *values: Value, id: int = 0, count: int = 5, phase: str = "decode", **more: object) -> Call:
    args = [Argument(value=value) for value in values]
    return Call.model_validate(
        {"id": id, "operator": operator, "args": args, "counts": [Count(phase=phase, count=count)], **more}
    )


def tensor(*shape: int, dtype: str = "float32", storage: int = 0, device: str = "cpu") -> TensorSpec:
    return TensorSpec(shape, dtype, storage=storage, device=device)


class Values:
    """Integer tensors for a Recording's values/."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def __call__(self, values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> SampledTensor:
        content = save({"value": torch.tensor(values, dtype=dtype)})
        name = f"{hashlib.sha256(content).hexdigest()}.safetensors"
        self.files[name] = content
        return SampledTensor(file=name)


def request_for(call: Call, seconds: float = 0.001) -> dict[str, object]:
    data: dict[str, object] = orjson.loads(call.line())
    return {"call": data, "sample": None, "seconds": seconds}

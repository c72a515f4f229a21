"""What a Workload gives of its inputs: scalars, and the tensors in the dataset's blobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kcap.errors import FormatError
from kcap.replay.definitions.draw import torch_dtype
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.workload import SafetensorsInput, ScalarInput, Workload


@dataclass
class Given:
    """`values` by input, None for an optional one that is left out; `missing`: files that are not there, by input."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read(definition: Definition, workload: Workload, dataset: Dataset | None) -> Given:
    """The inputs that `workload` does not leave to chance; FormatError for a blob that is not what the input is."""
    found = Given()
    for name, tensor in definition.inputs.items():
        match workload.inputs.get(name):
            case ScalarInput(value=value):
                found.values[name] = value
            case SafetensorsInput() as stored if dataset is not None and dataset.blob_file(stored).is_file():
                shape = definition.sizes(tensor.shape or (), workload.axes)
                found.values[name] = read_blob(dataset, stored, name, shape, torch_dtype(tensor.dtype))
            case SafetensorsInput(path=path):
                found.missing[name] = path
            case None if tensor.optional:
                found.values[name] = None
    return found


def read_blob(
    dataset: Dataset, stored: SafetensorsInput, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor of `stored`, which is the input `name`; FormatError if its file is damaged or holds another."""
    tensor: torch.Tensor = dataset.blob(stored)
    if tensor.shape != shape or tensor.dtype != dtype:
        reason = f"{_told(tensor.dtype, tensor.shape)}, but {name} is {_told(dtype, shape)}"
        raise FormatError(str(dataset.blob_file(stored)), f"{stored.tensor_key}: {reason}")
    return tensor


def _told(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

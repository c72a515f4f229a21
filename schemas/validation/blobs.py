"""A dataset's blobs: whether they are there, and hold tensors of the dtype and shape that their input has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kcap.errors import FormatError
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.workload import SafetensorsInput, Workload

# safetensors' names; its 4-bit type packs two elements, of which the formats say nothing
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "BOOL": "bool",
}
Header = dict[str, tuple[str, tuple[int, ...]]]


def check_blobs(dataset: Dataset, definition: Definition, workload: Workload) -> Iterator[str]:
    """What is wrong with the blobs of `workload`, which is an instance of `definition`; missing files aside."""
    for name, given in workload.inputs.items():
        if not isinstance(given, SafetensorsInput):
            continue
        try:
            path = dataset.blob_file(given)
            tensors = header(path) if path.is_file() else None
        except FormatError as error:
            yield f"inputs.{name}: {error.reason}"
        else:
            if tensors is not None:
                yield from (f"inputs.{name}: {reason}" for reason in _tensor(definition, workload, name, tensors))


def missing_blobs(dataset: Dataset, workload: Workload) -> Iterator[str]:
    """The blobs of `workload` that are not there."""
    for given in workload.inputs.values():
        if isinstance(given, SafetensorsInput):
            try:
                there = dataset.blob_file(given).is_file()
            except FormatError:
                continue  # an error of its own
            if not there:
                yield given.path


def header(path: Path) -> Header:
    """Each tensor's dtype, by safetensors' name, and shape; FormatError if it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()}
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise FormatError(str(path), f"{path.name}: not a readable safetensors file ({error})") from None


def _tensor(definition: Definition, workload: Workload, name: str, tensors: Header) -> Iterator[str]:
    given, wanted = workload.inputs[name], definition.inputs[name]
    assert isinstance(given, SafetensorsInput)
    if given.tensor_key not in tensors:
        yield f"{given.path} has no tensor {given.tensor_key}"
        return
    dtype, shape = tensors[given.tensor_key]
    if (stored := DTYPES.get(dtype, dtype)) != wanted.dtype and wanted.dtype != "float4_e2m1":
        yield f"{given.tensor_key} is {stored} in {given.path}, not {wanted.dtype}"
    sizes = definition.sizes(wanted.shape or [], workload.axes)
    if shape != sizes and wanted.dtype != "float4_e2m1":
        yield f"{given.tensor_key} is {list(shape)} in {given.path}, not {list(sizes)}"

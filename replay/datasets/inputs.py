"""The inputs of a Workload: its scalars, tensors from the dataset's blobs, and the rest random or by rules.

An input that cannot be random (an offset, a page, an expert, a probability) is made by the rule of its family
(kcap.schemas.derive.families), and so is one whose file is missing; the notes say so. The Definition's constraints hold
for the result. Other tensors are drawn as FlashInfer-Bench draws them (0.1.2, `bench/utils.py`, `_rand_tensor`):
standard normal numbers, for 8 bits clamped to -2 and 2 and cast. It cannot draw float4_e2m1, for which torch has no
cast: here any byte is two such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kcap.errors import FormatError, KcapError
from kcap.replay.rebuild import memory
from kcap.replay.rebuild.rebuild import DATA_DTYPES, SMALL_INTEGERS, IntegerRange
from kcap.schemas.derive import constraints, families
from kcap.schemas.derive.bound_call import Skip
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import (
    Definition,
    DefinitionTensor,
    SafetensorsInput,
    ScalarInput,
    Workload,
    check_workload,
)
from kcap.schemas.recording.dtypes import TORCH_NAMES
from kcap.system.memory import GIB

SHARE_OF_FREE = 0.5  # of the free memory, which the kernel needs too


@dataclass(frozen=True)
class WorkloadInputs:
    """`inputs` in the Definition's order; None where the Workload leaves out an optional one.

    `axes`: the sizes of the variable axes, a cache's trimmed to the pages in use. `notes`: how they differ from the
    Workload. `origins`: whether the Workload gives an input, a rule made it, or it is random. `free_integers`: those
    of the "ruled" that no rule knows, each element drawn from `integers`.
    """

    inputs: list[Any]
    notes: list[str]
    axes: dict[str, int]
    origins: dict[str, Literal["given", "ruled", "drawn"]] = field(default_factory=dict)
    free_integers: list[str] = field(default_factory=list)


def make_inputs(
    definition: Definition,
    workload: Workload,
    dataset: Dataset | None,
    device: str = "cpu",
    seed: int = 0,
    limit: int | None = None,
    integers: Mapping[str, IntegerRange] | None = None,
) -> WorkloadInputs:
    """The inputs of `workload` on `device`, the same for the same `seed`.

    `integers`: the least and the greatest of those of which nothing is known, by input, where not SMALL_INTEGERS.

    Skip if inputs and outputs take more than `limit` bytes (None: half of the free memory); FormatError for a blob that
    is damaged or of another shape or dtype; KcapError for a Workload that does not fit the Definition, or whose missing
    blob has integers that no rule makes; `BrokenConstraint` for a constraint that does not hold.
    """
    label = f"{definition.name} {workload.uuid}"
    if reasons := check_workload(definition, workload):
        raise KcapError(f"{label}: {reasons[0]}")
    draft = draft_inputs(definition, workload, read_given(definition, workload, dataset), seed, integers)
    _check_size(draft, memory.free_bytes(device) * SHARE_OF_FREE if limit is None else limit)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = {name: _placed_input(draft, name, generator) for name in definition.inputs}
    _check_constraints(draft, label, inputs)
    origins = {name: _origin_of(draft, name) for name in inputs}
    free = [name for name, origin in origins.items() if origin == "ruled" and name not in draft.ruled]
    return WorkloadInputs(list(inputs.values()), draft.notes(), draft.axes, origins, free)


def draft_inputs(
    definition: Definition,
    workload: Workload,
    stored: GivenInputs,
    seed: int,
    integers: Mapping[str, IntegerRange] | None = None,
) -> WorkloadDraft:
    """The inputs of `workload` that are given or integers, the caches trimmed; the others are made when read."""
    label = f"{definition.name} {workload.uuid}"
    draft = _new_draft(definition, workload, stored, seed)
    _check_constraints(draft, label)
    _make_integers(draft, label, integers or {})
    families.trim_inputs(draft)
    return draft


def _origin_of(draft: WorkloadDraft, name: str) -> Literal["given", "ruled", "drawn"]:
    if name in draft.given:
        return "given"
    return "drawn" if draft.made.get(name) is None else "ruled"


def _new_draft(definition: Definition, workload: Workload, stored: GivenInputs, seed: int) -> WorkloadDraft:
    axes = {name: size for name, size in workload.axes.items() if name not in definition.const_axes}
    generator = torch.Generator().manual_seed(seed)
    return WorkloadDraft(definition, axes, dict(stored.values), generator, _make_by_rule, stored.missing)


def _check_constraints(draft: WorkloadDraft, label: str, inputs: dict[str, Any] | None = None) -> None:
    """Check the constraints; while there are no `inputs`, only those on axes alone."""
    sizes = {**draft.axes, **draft.definition.const_axes}
    left_out = {name for name, value in draft.given.items() if value is None}
    texts = [text for text in draft.definition.constraints if not constraints.names(text) & left_out]
    if inputs is None:
        texts = [text for text in texts if constraints.names(text) <= sizes.keys()]
    constraints.check(texts, {**sizes, **(inputs or {})}, label)


def _make_integers(draft: WorkloadDraft, label: str, ranges: Mapping[str, IntegerRange]) -> None:
    """Make every integer input. Without a rule it is drawn, by default small, unless its file is missing."""
    for name, tensor in draft.definition.inputs.items():
        if tensor.shape is None or not _is_index(tensor) or draft[name] is not None or name in draft.given:
            continue
        if name in draft.missing:
            raise KcapError(f"{label}: inputs.{name}: {draft.missing[name]} is not there, and no rule knows its values")
        low, high = ranges.get(name, SMALL_INTEGERS)
        draft.made[name] = draft.integers(low, high + 1, draft.shape(name)).to(definition_dtype(tensor.dtype))
        draft.changes.append(f"drawn from {low} to {high}, for no rule knows it: {name}")


def _is_index(tensor: DefinitionTensor) -> bool:
    return tensor.dtype.startswith("int") and tensor.dtype not in DATA_DTYPES


def _make_by_rule(draft: WorkloadDraft, name: str) -> torch.Tensor | None:
    """The input `name` by the first rule that makes it; None if none does. Skip, where a rule lacks what it reads."""
    for rule in families.input_rules_for(draft.definition.op_type, name):
        try:
            value = rule(draft, name)
        except LookupError as error:
            kind = draft.definition.op_type
            raise Skip(f"inputs.{name}: its rule knows another form of {kind} ({error!r})") from error
        if value is not None:
            draft.ruled.append(name)
            return value.reshape(draft.shape(name)).to(definition_dtype(draft.definition.inputs[name].dtype))
    return None


def _check_size(draft: WorkloadDraft, limit: float) -> None:
    if (needed := draft.nbytes()) > limit:
        raise Skip(f"its tensors take {needed / GIB:.3g} GiB, the limit is {limit / GIB:.3g} GiB")


def _placed_input(draft: WorkloadDraft, name: str, generator: torch.Generator) -> Any:
    """The input `name` as the kernel takes it; random if nothing else makes it."""
    if draft.definition.inputs[name].shape is None or draft.given.get(name, draft) is None:
        return draft.given[name]
    value = draft[name]
    if value is None:
        return draw_tensor(draft.shape(name), draft.definition.inputs[name].dtype, generator)
    return value.to(generator.device)


@dataclass
class GivenInputs:
    """`values` by input, None for an optional one that is left out; `missing`: files that do not exist, by input."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read_given(definition: Definition, workload: Workload, dataset: Dataset | None) -> GivenInputs:
    """The inputs that `workload` gives; FormatError for a blob that does not match the input."""
    given = GivenInputs()
    for name, tensor in definition.inputs.items():
        match workload.inputs.get(name):
            case ScalarInput(value=value):
                given.values[name] = value
            case SafetensorsInput() as stored if dataset is not None and dataset.blob_file(stored).is_file():
                shape = definition.sizes(tensor.shape or (), workload.axes)
                given.values[name] = read_blob(dataset, stored, name, shape, definition_dtype(tensor.dtype))
            case SafetensorsInput(path=path):
                given.missing[name] = path
            case None if tensor.optional:
                given.values[name] = None
    return given


def read_blob(
    dataset: Dataset, stored: SafetensorsInput, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor of `stored`, for the input `name`; FormatError if its file is damaged or its tensor does not match."""
    tensor: torch.Tensor = dataset.blob(stored)
    if tensor.shape != shape or tensor.dtype != dtype:
        reason = f"{_dtype_and_shape(tensor.dtype, tensor.shape)}, but {name} is {_dtype_and_shape(dtype, shape)}"
        raise FormatError(str(dataset.blob_file(stored)), f"{stored.tensor_key}: {reason}")
    return tensor


def _dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


CAST_BLOCK = 1 << 24  # elements held in float32 at a time
CAST_LIMIT = 2.0


def definition_dtype(name: str) -> torch.dtype:
    """torch's dtype for a Definition's; Skip if this torch has none."""
    return torch_dtype(TORCH_NAMES.get(name, name), Skip)


def draw_tensor(shape: Sequence[int], name: str, generator: torch.Generator) -> torch.Tensor:
    """A random tensor of dtype `name` on the generator's device."""
    dtype, device = definition_dtype(name), generator.device
    match name:
        case "float32" | "float16" | "bfloat16":
            return torch.randn(tuple(shape), dtype=dtype, device=device, generator=generator)
        case "float4_e2m1":
            return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, device=device, generator=generator).view(
                dtype
            )
        case "bool":
            return torch.randint(0, 2, tuple(shape), dtype=dtype, device=device, generator=generator)
        case "int8":
            return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=device, generator=generator)
    return _cast_from_normal(torch.empty(tuple(shape), dtype=dtype, device=device), generator)


def _cast_from_normal(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    for part in tensor.view(-1).split(CAST_BLOCK):
        part.copy_(torch.randn(part.shape, device=tensor.device, generator=generator).clamp_(-CAST_LIMIT, CAST_LIMIT))
    return tensor

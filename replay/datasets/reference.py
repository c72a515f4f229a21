"""A Definition's reference: prepared for a Workload, its outputs checked against the Definition, run in a worker.

It is code from elsewhere. The worker (kcap.replay.datasets.reference_worker) forks for each reference, so that one that
crashes, hangs, fills the memory or leaves something behind costs only its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from kcap.replay.datasets.inputs import WorkloadInputs, definition_dtype, make_inputs
from kcap.schemas.files.python_source import function, parameters
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.recording.dtypes import TORCH_NAMES
from kcap.schemas.recording.records import Record
from kcap.system.worker_process import Session, Worker


@dataclass(frozen=True)
class PreparedReference:
    """`inputs` are in the Definition's order, as a Solution takes them; `arguments` in the reference's."""

    definition: Definition
    inputs: WorkloadInputs

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The reference's `run`. Its source is code from elsewhere: for a process that does nothing else."""
        return compile_reference(self.definition.reference, self.definition.name)

    @property
    def arguments(self) -> list[Any]:
        by_name = dict(zip(self.definition.inputs, self.inputs.inputs, strict=True))
        return [by_name[name] for name in argument_order(self.definition)]

    @property
    def notes(self) -> list[str]:
        """How inputs and call differ from the Workload and the Definition."""
        return self.inputs.notes + order_notes(self.definition)


def prepare_reference(
    definition: Definition,
    workload: Workload,
    dataset: Dataset | None,
    device: str = "cpu",
    seed: int = 0,
    limit: int | None = None,
) -> PreparedReference:
    """`workload` on `device`, the same for the same `seed`; raises what `make_inputs` raises, and runs nothing."""
    return PreparedReference(definition, make_inputs(definition, workload, dataset, device, seed, limit))


def compile_reference(text: str, name: str) -> Callable[..., Any]:
    """The `run` of a reference: this executes its source."""
    scope: dict[str, Any] = {"__name__": f"reference_{name}"}
    exec(compile(text, source_name(name), "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def source_name(name: str) -> str:
    """What tracebacks call the file of the reference of the Definition `name`."""
    return f"<reference of {name}>"


def argument_order(definition: Definition) -> list[str]:
    """The inputs as `run` takes them: in the Definition's order, unless its parameters name them all in another."""
    names = parameters(function(definition.reference, "run"))
    return names if sorted(names) == sorted(definition.inputs) else list(definition.inputs)


def order_notes(definition: Definition) -> list[str]:
    order = argument_order(definition)
    if order == list(definition.inputs):
        return []
    return [f"called by name, by position it would fail: its reference takes {', '.join(order)}"]


class OutputFacts(Record):
    """One output: its shape in elements, torch's dtype, and how many of its elements are not a number or infinite."""

    name: str
    shape: list[int]
    dtype: str
    nan: int = 0
    inf: int = 0


def named_outputs(definition: Definition, returned: Any) -> dict[str, torch.Tensor]:
    """The outputs by name, as FlashInfer-Bench takes them: one, several in order, or a dict; a number is a 0-D tensor.

    ValueError if there are too many or too few, or one is something else.
    """
    names = list(definition.outputs)
    if isinstance(returned, dict):
        by_name = {name: returned[name] for name in names if name in returned}
    else:
        listed = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(listed) != len(names):
            raise ValueError(f"returns {len(listed)} outputs, the Definition has {len(names)}")
        by_name = dict(zip(names, listed, strict=True))
    if missing := [name for name in names if name not in by_name]:
        raise ValueError(f"returns no {missing[0]}")
    return {name: _output_tensor(definition, name, value) for name, value in by_name.items()}


def check_output(definition: Definition, axes: Mapping[str, int], name: str, output: torch.Tensor) -> OutputFacts:
    """The facts of `output`; ValueError if shape (for the sizes in `axes`) or dtype are not the Definition's."""
    tensor = definition.outputs[name]
    shape, dtype = definition.sizes(tensor.shape or (), axes), definition_dtype(tensor.dtype)
    if output.shape != shape:
        raise ValueError(f"{name}: has shape {list(output.shape)}, the Definition's is {list(shape)}")
    if output.dtype != dtype:
        raise ValueError(f"{name}: is {_dtype_word(output.dtype)}, the Definition's is {_dtype_word(dtype)}")
    return OutputFacts(name=name, shape=list(shape), dtype=_dtype_word(dtype), **_not_finite(output))


def _output_tensor(definition: Definition, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=definition_dtype(definition.outputs[name].dtype))
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: is a {type(value).__name__}, no tensor")
    return value


def _not_finite(output: torch.Tensor) -> dict[str, int]:
    if not output.is_floating_point() or _dtype_word(output.dtype) == TORCH_NAMES["float4_e2m1"]:
        return {}
    values = output.float() if output.dtype.itemsize == 1 else output
    return {"nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}


def _dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


REFERENCE_WORKER = "kcap.replay.datasets.reference_worker"


class ReferenceSession(Session):
    """`root`: the dataset that blobs are read from. `limit`, `memory`: as in References."""

    root: str | None
    limit: int | None
    memory: int | None


class ReferenceRequest(TypedDict):
    """A Definition, as its file has it, to run on a Workload."""

    definition: str
    workload: dict[str, Any]
    seed: int


class ReferenceResult(Record):
    """The result of one reference. `skipped`: it cannot run here; `failed`: the Definition or its dataset is at fault.

    `axes`: the sizes that it ran on; `seconds`: its time without making the inputs; `notes`: how inputs and call differ
    from the Workload and the Definition.
    """

    status: Literal["ok", "skipped", "failed"]
    reason: str | None = None
    axes: dict[str, int] = {}
    outputs: list[OutputFacts] = []
    seconds: float | None = None
    notes: list[str] = []


class References:
    """Runs references on `device`, one after another. `root`: the dataset that blobs are read from.

    `limit`: bytes that inputs and outputs may take, and `memory`: bytes that the process may (None: what is free).
    """

    def __init__(
        self,
        root: Path | None,
        device: str = "cpu",
        limit: int | None = None,
        memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        path = str(root) if root is not None else None
        session = ReferenceSession(root=path, device=device, limit=limit, memory=memory, threads=threads)
        self.worker = Worker(session, REFERENCE_WORKER)

    def __enter__(self) -> References:
        self.worker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.__exit__()

    def run(self, definition: Definition, workload: Workload, timeout: float, seed: int = 0) -> ReferenceResult:
        """The result of the reference on `workload`; `timeout`: seconds for it and for making its inputs."""
        text = definitions_file.to_bytes(definition).decode()
        request = ReferenceRequest(definition=text, workload=workload.model_dump(mode="json"), seed=seed)
        return ReferenceResult.model_validate(self.worker.run(request, timeout))

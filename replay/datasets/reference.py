"""A Definition's reference: made ready for a Workload, its outputs held against the Definition, run in a worker.

It is code from elsewhere. A worker (kcap.replay.datasets.reference_worker) forks for each reference, so that one that
crashes, hangs, fills the memory or leaves something behind costs its own result alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from kcap.replay.datasets.inputs import WorkloadInputs, definition_dtype, make_inputs
from kcap.schemas.files.python_source import function, parameters
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.recording.dtypes import TORCH_NAMES
from kcap.schemas.recording.records import Record
from kcap.system.worker_process import Worker


@dataclass(frozen=True)
class PreparedReference:
    """`made.inputs` are in the Definition's order, as a Solution takes them; `arguments` as the reference does."""

    definition: Definition
    made: WorkloadInputs

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The reference's `run`. Its source is code from elsewhere: ask in a process that is there for it alone."""
        return compile_reference(self.definition.reference, self.definition.name)

    @property
    def arguments(self) -> list[Any]:
        given = dict(zip(self.definition.inputs, self.made.inputs, strict=True))
        return [given[name] for name in argument_order(self.definition)]

    @property
    def notes(self) -> list[str]:
        """What is not as the Workload or the Definition has it."""
        return self.made.notes + order_notes(self.definition)


def prepare_reference(
    definition: Definition,
    workload: Workload,
    dataset: Dataset | None,
    device: str = "cpu",
    seed: int = 0,
    limit: int | None = None,
) -> PreparedReference:
    """`workload` on `device`, the same for the same `seed`; raises what `make_inputs` does, and runs nothing."""
    return PreparedReference(definition, make_inputs(definition, workload, dataset, device, seed, limit))


def compile_reference(text: str, name: str) -> Callable[..., Any]:
    """The `run` of a reference; this process is there for it."""
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
    taken = argument_order(definition)
    if taken == list(definition.inputs):
        return []
    return [f"called by name, by position it would fail: its reference takes {', '.join(taken)}"]


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
        given = {name: returned[name] for name in names if name in returned}
    else:
        listed = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(listed) != len(names):
            raise ValueError(f"returns {len(listed)} outputs, the Definition has {len(names)}")
        given = dict(zip(names, listed, strict=True))
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"returns no {missing[0]}")
    return {name: _output_tensor(definition, name, value) for name, value in given.items()}


def check_output(definition: Definition, axes: Mapping[str, int], name: str, made: torch.Tensor) -> OutputFacts:
    """What `made` is; ValueError if its shape or dtype is not the output's where variable axes are as in `axes`."""
    tensor = definition.outputs[name]
    shape, dtype = definition.sizes(tensor.shape or (), axes), definition_dtype(tensor.dtype)
    if made.shape != shape:
        raise ValueError(f"{name}: has shape {list(made.shape)}, the Definition's is {list(shape)}")
    if made.dtype != dtype:
        raise ValueError(f"{name}: is {_dtype_word(made.dtype)}, the Definition's is {_dtype_word(dtype)}")
    return OutputFacts(name=name, shape=list(shape), dtype=_dtype_word(dtype), **_not_finite(made))


def _output_tensor(definition: Definition, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=definition_dtype(definition.outputs[name].dtype))
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: is a {type(value).__name__}, no tensor")
    return value


def _not_finite(made: torch.Tensor) -> dict[str, int]:
    if not made.is_floating_point() or _dtype_word(made.dtype) == TORCH_NAMES["float4_e2m1"]:
        return {}
    real = made.float() if made.dtype.itemsize == 1 else made
    return {"nan": int(real.isnan().sum()), "inf": int(real.isinf().sum())}


def _dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


REFERENCE_WORKER = "kcap.replay.datasets.reference_worker"


class ReferenceResult(Record):
    """What came of one reference. `skipped`: it cannot run here; `failed`: the Definition or its dataset is at fault.

    `axes`: the sizes that it ran on; `seconds`: its own time, the making of its inputs apart; `notes`: what is not as
    the Workload or the Definition has it.
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
        session = {"root": path, "device": device, "limit": limit, "memory": memory, "threads": threads}
        self.worker = Worker(session, REFERENCE_WORKER)

    def __enter__(self) -> References:
        self.worker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.__exit__()

    def run(self, definition: Definition, workload: Workload, timeout: float, seed: int = 0) -> ReferenceResult:
        """What came of the reference on `workload`; `timeout`: seconds for it and the making of its inputs."""
        request = {
            "definition": definitions_file.to_bytes(definition).decode(),
            "workload": workload.model_dump(mode="json"),
            "seed": seed,
        }
        return ReferenceResult.model_validate(self.worker.run(request, timeout))

"""`python -m kcap.bench.tasks.profiled_run REQUEST`: a Solution on a Workload, once warm and once while ncu looks.

It runs as it is, in no sandbox: `kcap judge --profile` asks for this by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch

from kcap.bench.build import build, environment
from kcap.replay.datasets.inputs import make_inputs
from kcap.schemas.derive.invocation import torch_dtype
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.flashinfer.solution import Solution


def main(file: Path) -> None:
    request = orjson.loads(file.read_bytes())
    definition = definitions_file.from_bytes(request["definition"].encode())
    workload = Workload.model_validate(request["workload"])
    solution = Solution.model_validate(request["solution"])
    os.environ |= environment(Path(request["folder"]))
    run, device = build(solution, Path(request["folder"])), request["device"]
    workload_inputs = make_inputs(definition, workload, Dataset(Path(request["dataset"])), device)
    arguments = [*workload_inputs.inputs]
    if solution.spec.destination_passing_style:
        arguments += _outputs(definition, workload_inputs.axes, device)
    run(*arguments)  # what is compiled at the first call is compiled now
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _outputs(definition: Definition, axes: Mapping[str, int], device: str) -> list[torch.Tensor]:
    return [
        torch.empty(definition.sizes(output.shape or [], axes), dtype=torch_dtype(output.dtype), device=device)
        for output in definition.outputs.values()
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

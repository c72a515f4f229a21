"""`sol-execbench`: a folder for each problem, with `definition.json` and `workload.jsonl`.

Problems lie in L1 and, where a Definition's tags call it fused, in L2: `scripts/run_dataset.py` looks in folders with
its categories' names alone. Source: SOL-ExecBench's `core/data/definition.py`, `core/data/workload.py`,
`core/bench/correctness.py` and `driver/templates/eval_driver.py`. Its forms are
FlashInfer-Bench's, with a tolerance for each Workload, |out - ref| <= max_atol + max_rtol * |ref| for a share of the
elements. Blobs are named from the output's root, which FLASHINFER_TRACE_DIR tells its driver. Its validators want the
names of `run`'s parameters to be the inputs', and no input named as an axis.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import torch

from kcap.bench.accuracy import RTOL
from kcap.bench.check.draws import TargetDraw
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.cases import NO_BLOB, Account, Case
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.files.python_source import function, parameters
from kcap.schemas.flashinfer.definition import Definition, RandomInput, SafetensorsInput
from kcap.schemas.results.export_loss import ExportLoss

MATCHED = 0.99
DRAW = TargetDraw("SOL-ExecBench", tolerated=("-inf",))


@exporter("sol-execbench")
class SolExecBench(Exporter):
    """One folder for each Definition, a Workload for every Sample."""

    needs = "in a clone of SOL-ExecBench"
    takes = "definitions"

    def write(self, request: ExportRequest) -> ExportLoss:
        account = Account(request, DRAW)
        cases = (account.with_stored_draws(case) for case in account.taken_cases(_refuse, samples=True))
        for name, group in groupby(cases, key=lambda case: case.definition.name):
            _write(request.output, name, list(group))
        return account.loss("sol-execbench")

    def following(self, output: Path) -> str:
        folder = shlex.quote(str(output.absolute()))
        return f"FLASHINFER_TRACE_DIR={folder} python scripts/run_dataset.py {folder}"


def _refuse(case: Case) -> str | None:
    """Why its validators or its generator of inputs would stop at it."""
    definition = case.definition
    inputs = list(definition.inputs)
    if parameters(function(definition.reference, "run")) != inputs:
        return "SOL-ExecBench wants run's parameters to be named as the inputs"
    if both := [name for name in inputs if name in definition.axes]:
        return f"SOL-ExecBench takes no input named as an axis: {both[0]}"
    if missing := [name for name in inputs if name not in case.workload.inputs]:
        return f"SOL-ExecBench has no optional inputs: {missing[0]} is left out"
    return NO_BLOB if case.lacks_blob() else case.bounded_too_large()


def _write(root: Path, name: str, cases: list[Case]) -> None:
    from safetensors.torch import save_file

    folder = root / f"L{cases[0].level}" / name
    folder.mkdir(parents=True)
    write_json(folder / "definition.json", described(cases[0].definition))
    with (folder / "workload.jsonl").open("wb") as file:
        file.writelines(orjson.dumps(_workload(case, f"{folder.relative_to(root)}")) + b"\n" for case in cases)
    for case in cases:
        if case.blob:
            tensors = {key: tensor.clone().contiguous() for key, tensor in case.blob.items()}
            save_file(tensors, folder / f"{case.workload.uuid}.safetensors")


def described(definition: Definition) -> dict[str, Any]:
    """Its Definition: FlashInfer-Bench's without tags."""
    plain = definition.model_dump(mode="json")
    for tensor in plain["inputs"].values():
        tensor.pop("optional", None)
    return {key: value for key, value in plain.items() if key != "tags"}


def _workload(case: Case, folder: str) -> dict[str, Any]:
    inputs = {}
    for key, _, workload_input in case.tensors():
        path = f"{folder}/{case.workload.uuid}.safetensors"
        stored = (
            SafetensorsInput(path=path, tensor_key=key)
            if isinstance(workload_input, SafetensorsInput)
            else workload_input
        )
        inputs[key] = (stored or RandomInput()).model_dump(mode="json")
    uuid, axes = case.workload.uuid, case.workload.axes
    return {"uuid": uuid, "axes": axes, "inputs": inputs, "tolerance": tolerance(case.definition)}


def tolerance(definition: Definition) -> dict[str, Any]:
    """What a right kernel may differ by: the widest of its outputs' dtypes, nothing for integers alone."""
    dtypes = [getattr(torch, output.dtype, None) for output in definition.outputs.values()]
    bound = _widest(dtype for dtype in dtypes if dtype is not None)
    ratio = MATCHED if bound else 1.0
    # -inf is right where the reference has it: the logarithm of an empty sum, a mask
    return {"max_atol": bound, "max_rtol": bound, "required_matched_ratio": ratio, "allow_negative_inf": True}


def _widest(dtypes: Iterable[torch.dtype]) -> float:
    return max((RTOL.get(dtype, 0.0) for dtype in dtypes), default=0.0)

"""Run one reference in this process: make its inputs, call it, look at its outputs.

Only a process that is there for nothing else does so (kcap.bench.reference_worker): a reference is code from elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kcap.bench.check import compiled
from kcap.bench.inputs import Made, make_inputs
from kcap.bench.outputs import check_output, outputs_of
from kcap.bench.reference import ReferenceResult
from kcap.errors import KcapError
from kcap.replay.runner import NO_MEMORY
from kcap.replay.skip import Skip
from kcap.schemas import definition as definitions_file
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.python_source import function, parameters
from kcap.schemas.workload import Workload


def run(session: dict[str, Any], request: dict[str, Any]) -> ReferenceResult:
    """What comes of the request's reference; no error of the inputs' or its own leaves here."""
    definition = definitions_file.from_bytes(request["definition"].encode())
    dataset = Dataset(Path(session["root"])) if session["root"] else None
    workload = Workload.model_validate(request["workload"])
    try:
        made = make_inputs(definition, workload, dataset, session["device"], request["seed"], session["limit"])
    except Skip as error:
        return ReferenceResult(status="skipped", reason=str(error))
    except KcapError as error:
        return ReferenceResult(status="failed", reason=str(error))
    except (MemoryError, RuntimeError) as error:
        return verdict(definition, error)
    told = {"axes": made.axes, "notes": made.notes + note_on_order(definition)}
    try:
        return call(definition, made, request["seed"]).model_copy(update=told)
    except BaseException as error:  # a reference may raise what it likes: SystemExit, too
        return verdict(definition, error).model_copy(update=told)


def call(definition: Definition, made: Made, seed: int) -> ReferenceResult:
    """The outputs and the time of a reference that runs; ValueError for outputs that are not the Definition's."""
    given = dict(zip(definition.inputs, made.inputs, strict=True))
    ordered = [given[name] for name in order(definition)]
    torch.manual_seed(seed)
    began = time.perf_counter()
    outputs = outputs_of(definition, compiled(definition.reference, definition.name)(*ordered))
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in ordered):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    checked = [check_output(definition, made.axes, name, output) for name, output in outputs.items()]
    return ReferenceResult(status="ok", outputs=checked, seconds=seconds)


def order(definition: Definition) -> list[str]:
    """The inputs as `run` takes them: in the Definition's order, unless its parameters name them all in another."""
    names = parameters(function(definition.reference, "run"))
    return names if sorted(names) == sorted(definition.inputs) else list(definition.inputs)


def note_on_order(definition: Definition) -> list[str]:
    taken = order(definition)
    if taken == list(definition.inputs):
        return []
    return [f"called by name, by position it would fail: its reference takes {', '.join(taken)}"]


def verdict(definition: Definition, error: BaseException) -> ReferenceResult:
    """Skipped, where this machine cannot run the reference; failed, where the Definition is at fault."""
    text = str(error).strip()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return ReferenceResult(status="skipped", reason="its reference takes more memory than there is")
    if isinstance(error, ModuleNotFoundError):
        return ReferenceResult(status="skipped", reason=f"its reference imports {error.name}, which is not installed")
    line = f": {text.splitlines()[0][:200]}" if text else ""
    number = last_line(definition, error)
    where = f" (line {number} of the reference)" if number else ""
    return ReferenceResult(status="failed", reason=f"{type(error).__name__}{line}{where}")


def last_line(definition: Definition, error: BaseException) -> int | None:
    """The last line of the reference that `error` came through; None if it came through none."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<reference of {definition.name}>":
            number = trace.tb_lineno
        trace = trace.tb_next
    return number

"""Run one reference in this process: make its inputs, call it, look at its outputs.

Only a process that is there for nothing else does so (kcap.replay.definitions.forks): a reference is code from
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kcap.errors import KcapError
from kcap.replay.definitions.outputs import check_output, outputs_of
from kcap.replay.definitions.prepared import Prepared, prepare, source_name
from kcap.replay.definitions.reference import ReferenceResult
from kcap.replay.runner import NO_MEMORY
from kcap.replay.skip import Skip
from kcap.schemas import definition as definitions_file
from kcap.schemas.dataset import Dataset
from kcap.schemas.definition import Definition
from kcap.schemas.workload import Workload


def run(session: dict[str, Any], request: dict[str, Any]) -> ReferenceResult:
    """What comes of the request's reference; no error of the inputs' or its own leaves here."""
    return ReferenceResult(**attempt(session, request, call))


def attempt(
    session: dict[str, Any], request: dict[str, Any], use: Callable[[Prepared, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """What `use` makes of the request's Workload, or status and reason where it comes to nothing; and its notes."""
    definition = definitions_file.from_bytes(request["definition"].encode())
    dataset = Dataset(Path(session["root"])) if session["root"] else None
    workload = Workload.model_validate(request["workload"])
    try:
        ready = prepare(definition, workload, dataset, session["device"], request["seed"], session["limit"])
    except Skip as error:
        return {"status": "skipped", "reason": str(error)}
    except KcapError as error:
        return {"status": "failed", "reason": str(error)}
    except (MemoryError, RuntimeError) as error:
        return verdict(definition, error)
    told = {"axes": ready.made.axes, "notes": ready.notes}
    try:
        return {**told, **use(ready, request)}
    except BaseException as error:  # a reference may raise what it likes: SystemExit, too
        return {**told, **verdict(definition, error)}


def call(ready: Prepared, request: dict[str, Any]) -> dict[str, Any]:
    """The outputs and the time of a reference that runs; ValueError for outputs that are not the Definition's."""
    arguments = ready.arguments
    torch.manual_seed(request["seed"])
    began = time.perf_counter()
    outputs = outputs_of(ready.definition, ready.reference(*arguments))
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    checked = [check_output(ready.definition, ready.made.axes, name, output) for name, output in outputs.items()]
    return {"status": "ok", "outputs": checked, "seconds": seconds}


def verdict(definition: Definition, error: BaseException) -> dict[str, Any]:
    """Skipped, where this machine cannot run the reference; failed, where the Definition is at fault."""
    text = str(error).strip()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return {"status": "skipped", "reason": "its reference takes more memory than there is"}
    if isinstance(error, ModuleNotFoundError):
        return {"status": "skipped", "reason": f"its reference imports {error.name}, which is not installed"}
    line = f": {text.splitlines()[0][:200]}" if text else ""
    number = last_line(definition, error)
    where = f" (line {number} of the reference)" if number else ""
    return {"status": "failed", "reason": f"{type(error).__name__}{line}{where}"}


def last_line(definition: Definition, error: BaseException) -> int | None:
    """The last line of the reference that `error` came through; None if it came through none."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source_name(definition.name):
            number = trace.tb_lineno
        trace = trace.tb_next
    return number

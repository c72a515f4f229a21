"""Run or time one reference in this process: make its inputs, call it, look at its outputs, run the clock.

Only a process that is there for nothing else does so (kcap.replay.datasets.forks): a reference is code from
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kcap.errors import KcapError
from kcap.replay.calls.runner import NO_MEMORY, TimingOptions, is_persistent_name, timing_fields
from kcap.replay.datasets.reference import (
    PreparedReference,
    ReferenceResult,
    argument_order,
    check_output,
    named_outputs,
    prepare_reference,
    source_name,
)
from kcap.replay.roofline.cost import cost_of_workload, least_work
from kcap.replay.timing.clock import time_on
from kcap.replay.timing.device import read_clocks
from kcap.replay.timing.rotation import Rotation, SetSize
from kcap.schemas.derive.bound_call import Inputs, Skip, StorageKey
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.results.measurement import Cache


def run_reference(session: dict[str, Any], request: dict[str, Any]) -> ReferenceResult:
    """What comes of the request's reference; no error of the inputs' or its own leaves here."""
    return ReferenceResult(**attempt_workload(session, request, call_reference))


def attempt_workload(
    session: dict[str, Any], request: dict[str, Any], use: Callable[[PreparedReference, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """What `use` makes of the request's Workload, or status and reason where it comes to nothing; and its notes."""
    definition = definitions_file.from_bytes(request["definition"].encode())
    dataset = Dataset(Path(session["root"])) if session["root"] else None
    workload = Workload.model_validate(request["workload"])
    try:
        ready = prepare_reference(definition, workload, dataset, session["device"], request["seed"], session["limit"])
    except Skip as error:
        return {"status": "skipped", "reason": str(error)}
    except KcapError as error:
        return {"status": "failed", "reason": str(error)}
    except (MemoryError, RuntimeError) as error:
        return reference_error(definition, error)
    told = {"axes": ready.made.axes, "notes": ready.notes}
    try:
        return {**told, **use(ready, request)}
    except BaseException as error:  # a reference may raise what it likes: SystemExit, too
        return {**told, **reference_error(definition, error)}


def call_reference(ready: PreparedReference, request: dict[str, Any]) -> dict[str, Any]:
    """The outputs and the time of a reference that runs; ValueError for outputs that are not the Definition's."""
    arguments = ready.arguments
    torch.manual_seed(request["seed"])
    began = time.perf_counter()
    outputs = named_outputs(ready.definition, ready.reference(*arguments))
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    checked = [check_output(ready.definition, ready.made.axes, name, output) for name, output in outputs.items()]
    return {"status": "ok", "outputs": checked, "seconds": seconds}


def reference_error(definition: Definition, error: BaseException) -> dict[str, Any]:
    """Skipped, where this machine cannot run the reference; failed, where the Definition is at fault."""
    text = str(error).strip()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return {"status": "skipped", "reason": "its reference takes more memory than there is"}
    if isinstance(error, ModuleNotFoundError):
        return {"status": "skipped", "reason": f"its reference imports {error.name}, which is not installed"}
    line = f": {text.splitlines()[0][:200]}" if text else ""
    number = reference_line(definition, error)
    where = f" (line {number} of the reference)" if number else ""
    return {"status": "failed", "reason": f"{type(error).__name__}{line}{where}"}


def reference_line(definition: Definition, error: BaseException) -> int | None:
    """The last line of the reference that `error` came through; None if it came through none."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source_name(definition.name):
            number = trace.tb_lineno
        trace = trace.tb_next
    return number


def time_reference(session: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Measurement that this decides; no error of the inputs or of the reference leaves here."""
    return attempt_workload(session, request, partial(measure_reference, session["device"], TimingOptions.of(session)))


def measure_reference(
    device: str, how: TimingOptions, ready: PreparedReference, request: dict[str, Any]
) -> dict[str, Any]:
    """Times of a reference that runs; ValueError for outputs that are not the Definition's."""
    torch.manual_seed(request["seed"])
    with torch.inference_mode():
        first = inputs_of_arguments(ready.arguments)
        written = try_reference(ready, first)
        rotation = rotation_of_reference(how.cache, ready, first, device)
        before = read_clocks(device)
        timing = time_on(device, ready.reference, first, rotation, written, request["seconds"], how.kernels)
    told = timing_fields(replace(timing, notes=[*ready.notes, *timing.notes]), first.total, first.total, device, before)
    inputs = dict(zip(ready.definition.inputs, ready.made.inputs, strict=True))
    return {**told, "work": least_work(cost_of_workload(ready.definition, inputs), first.total - rotation.rotating)}


def rotation_of_reference(cache: Cache, ready: PreparedReference, first: Inputs, device: str) -> Rotation:
    """What goes round in the state `cache`; weights and caches are what the Definition names so."""
    names = [name.lower() for name in argument_order(ready.definition)]
    moved = {place for _, place in first.buffers if is_persistent_name(names[place], product="a" in names)}
    size = sum(len(buffer) for (_, place), buffer in first.buffers.items() if place in moved)
    whole, copied = SetSize(first.total, first.total), partial(clone_arguments, first)
    return Rotation.of(cache, whole, SetSize(size, size), copied, partial(copied, moved), device)


def inputs_of_arguments(arguments: list[Any]) -> Inputs:
    """`arguments`, and each tensor's bytes under its device and place."""
    args = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in arguments]
    tensors = {number: value for number, value in enumerate(args) if isinstance(value, torch.Tensor)}
    return Inputs(args, {}, {(str(t.device), number): t.view(-1).view(torch.uint8) for number, t in tensors.items()})


def clone_arguments(inputs: Inputs, moved: Collection[int] | None = None) -> Inputs:
    """The same arguments with the same content at other addresses: all, or those at the places `moved`."""
    copied = range(len(inputs.args)) if moved is None else moved
    args = [a.clone() if isinstance(a, torch.Tensor) and n in copied else a for n, a in enumerate(inputs.args)]
    return inputs_of_arguments(args)


def try_reference(ready: PreparedReference, inputs: Inputs) -> list[StorageKey]:
    """Run the reference and hold its outputs against the Definition; the buffers of the inputs that it wrote to.

    What it wrote is put back.
    """
    saved = clone_arguments(inputs)
    before = {key: inputs.args[key[1]]._version for key in inputs.buffers}
    outputs = named_outputs(ready.definition, ready.reference(*inputs.args))
    for name, output in outputs.items():
        check_output(ready.definition, ready.made.axes, name, output)
    written = [key for key, version in before.items() if inputs.args[key[1]]._version != version]
    for key in written:
        inputs.buffers[key].copy_(saved.buffers[key])
    return written

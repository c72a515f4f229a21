"""Run or time one reference in this process: make its inputs, call it, check its outputs, time it.

A reference is code from elsewhere: only a fork does this, which ends afterwards (kcap.replay.datasets.forks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kcap.errors import KcapError, kind_and_line
from kcap.replay.calls.runner import NO_MEMORY, TimingOptions, timing_fields
from kcap.replay.datasets.reference import (
    PreparedReference,
    ReferenceRequest,
    ReferenceResult,
    ReferenceSession,
    argument_order,
    check_output,
    named_outputs,
    prepare_reference,
    source_name,
)
from kcap.replay.datasets.workloads import TimingRequest
from kcap.replay.jobs import ReplaySession
from kcap.replay.rebuild.persistent import is_persistent_name
from kcap.replay.roofline.cost import cost_of_workload, least_work
from kcap.replay.timing.clock import time_call
from kcap.replay.timing.device import read_clocks
from kcap.replay.timing.rotation import Rotation, SetSize
from kcap.schemas.derive.bound_call import Inputs, Skip, StorageKey
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.results.measurement import Cache

R = TypeVar("R", ReferenceRequest, TimingRequest)


def run_reference(session: ReferenceSession, request: ReferenceRequest) -> ReferenceResult:
    """The result of the request's reference; an error of its inputs or its own is a result too."""
    return ReferenceResult(**attempt_workload(session, request, call_reference))


def attempt_workload(
    session: ReferenceSession | ReplaySession, request: R, run: Callable[[PreparedReference, R], dict[str, Any]]
) -> dict[str, Any]:
    """What `run` returns for the request's Workload, or status and reason where it fails; with axes and notes."""
    definition = definitions_file.from_bytes(request["definition"].encode())
    dataset = Dataset(Path(session["root"])) if session["root"] else None
    workload = Workload.model_validate(request["workload"])
    try:
        prepared = prepare_reference(
            definition, workload, dataset, session["device"] or "cpu", request["seed"], session["limit"]
        )
    except Skip as error:
        return {"status": "skipped", "reason": str(error)}
    except KcapError as error:
        return {"status": "failed", "reason": str(error)}
    except (MemoryError, RuntimeError) as error:
        return reference_error(definition, error)
    fields = {"axes": prepared.inputs.axes, "notes": prepared.notes}
    try:
        return {**fields, **run(prepared, request)}
    except BaseException as error:  # a reference may raise what it likes: SystemExit, too
        return {**fields, **reference_error(definition, error)}


def call_reference(prepared: PreparedReference, request: ReferenceRequest) -> dict[str, Any]:
    """The outputs and the time of a reference; ValueError for outputs that do not match the Definition."""
    arguments = prepared.arguments
    torch.manual_seed(request["seed"])
    start = time.perf_counter()
    outputs = named_outputs(prepared.definition, prepared.reference(*arguments))
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    checked = [
        check_output(prepared.definition, prepared.inputs.axes, name, output) for name, output in outputs.items()
    ]
    return {"status": "ok", "outputs": checked, "seconds": seconds}


def reference_error(definition: Definition, error: BaseException) -> dict[str, Any]:
    """Skipped where this machine cannot run the reference; failed where the Definition is at fault."""
    text = str(error).strip()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return {"status": "skipped", "reason": "its reference takes more memory than there is"}
    if isinstance(error, ModuleNotFoundError):
        return {"status": "skipped", "reason": f"its reference imports {error.name}, which is not installed"}
    number = reference_line(definition, error)
    location = f" (line {number} of the reference)" if number else ""
    return {"status": "failed", "reason": f"{kind_and_line(error, 200)}{location}"}


def reference_line(definition: Definition, error: BaseException) -> int | None:
    """The last line of the reference that `error` came through; None if it came through none."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source_name(definition.name):
            number = trace.tb_lineno
        trace = trace.tb_next
    return number


def time_reference(session: ReplaySession, device: str, request: TimingRequest) -> dict[str, Any]:
    """The fields of a Measurement that the clock gives; an error of the inputs or the reference is in them too."""
    measure = partial(measure_reference, device, TimingOptions.of(session))
    return attempt_workload({**session, "device": device}, request, measure)


def measure_reference(
    device: str, options: TimingOptions, prepared: PreparedReference, request: TimingRequest
) -> dict[str, Any]:
    """The times of a reference; ValueError for outputs that do not match the Definition."""
    torch.manual_seed(request["seed"])
    with torch.inference_mode():
        inputs = inputs_of_arguments(prepared.arguments)
        written = try_reference(prepared, inputs)
        rotation = rotation_of_reference(options.cache, prepared, inputs, device)
        before = read_clocks(device)
        timing = time_call(
            device, prepared.reference, inputs, rotation, written, request["seconds"], options.kernel_durations
        )
    fields = timing_fields(
        replace(timing, notes=[*prepared.notes, *timing.notes]), inputs.total, inputs.total, device, before
    )
    by_name = dict(zip(prepared.definition.inputs, prepared.inputs.inputs, strict=True))
    return {
        **fields,
        "work": least_work(cost_of_workload(prepared.definition, by_name), inputs.total - rotation.rotating),
    }


def rotation_of_reference(cache: Cache, prepared: PreparedReference, inputs: Inputs, device: str) -> Rotation:
    """What rotates in the state `cache`; an input is a weight or a cache if its name says so."""
    names = [name.lower() for name in argument_order(prepared.definition)]
    persistent = {
        position for _, position in inputs.buffers if is_persistent_name(names[position], product="a" in names)
    }
    size = sum(len(buffer) for (_, position), buffer in inputs.buffers.items() if position in persistent)
    all_inputs, clone = SetSize(inputs.total, inputs.total), partial(clone_arguments, inputs)
    return Rotation.of(cache, all_inputs, SetSize(size, size), clone, partial(clone, persistent), device)


def inputs_of_arguments(arguments: list[Any]) -> Inputs:
    """`arguments`, and each tensor's bytes under its device and position."""
    args = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in arguments]
    tensors = {number: value for number, value in enumerate(args) if isinstance(value, torch.Tensor)}
    return Inputs(args, {}, {(str(t.device), number): t.view(-1).view(torch.uint8) for number, t in tensors.items()})


def clone_arguments(inputs: Inputs, positions: Collection[int] | None = None) -> Inputs:
    """The same arguments with the same content at other addresses: all of them, or those at `positions`."""
    cloned = range(len(inputs.args)) if positions is None else positions
    args = [a.clone() if isinstance(a, torch.Tensor) and n in cloned else a for n, a in enumerate(inputs.args)]
    return inputs_of_arguments(args)


def try_reference(prepared: PreparedReference, inputs: Inputs) -> list[StorageKey]:
    """Run the reference and check its outputs; the buffers of the inputs that it wrote to, which are restored."""
    originals = clone_arguments(inputs)
    before = {key: inputs.args[key[1]]._version for key in inputs.buffers}
    outputs = named_outputs(prepared.definition, prepared.reference(*inputs.args))
    for name, output in outputs.items():
        check_output(prepared.definition, prepared.inputs.axes, name, output)
    written = [key for key, version in before.items() if inputs.args[key[1]]._version != version]
    for key in written:
        inputs.buffers[key].copy_(originals.buffers[key])
    return written

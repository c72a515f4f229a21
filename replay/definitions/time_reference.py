"""Time one reference in this process: make its inputs, see which of them it writes to, run the clock."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kcap.replay.definitions.outputs import check_output, outputs_of
from kcap.replay.definitions.prepared import Prepared
from kcap.replay.definitions.run_reference import attempt
from kcap.replay.inputs import Inputs
from kcap.replay.memory import Key
from kcap.replay.runner import LIMIT_FACTOR, report
from kcap.replay.timing.clock import Size, time_on
from kcap.replay.timing.stop import Budget


def run(session: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Measurement that this decides; no error of the inputs or of the reference leaves here."""
    return attempt(session, request, partial(measure, session["device"]))


def measure(device: str, ready: Prepared, request: dict[str, Any]) -> dict[str, Any]:
    """Times of a reference that runs; ValueError for outputs that are not the Definition's."""
    torch.manual_seed(request["seed"])
    with torch.inference_mode():
        first = inputs_of(ready.arguments)
        written = try_once(ready, first)
        total = sum(len(buffer) for buffer in first.buffers.values())
        budget = Budget(request["seconds"], LIMIT_FACTOR * request["seconds"])
        timing = time_on(device, ready.reference, first, partial(clone, first), Size(total, total), written, budget)
    return report(replace(timing, notes=[*ready.notes, *timing.notes]), total, total, device)


def inputs_of(arguments: list[Any]) -> Inputs:
    """`arguments`, and each tensor's bytes under its device and place."""
    args = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in arguments]
    tensors = {number: value for number, value in enumerate(args) if isinstance(value, torch.Tensor)}
    return Inputs(args, {}, {(str(t.device), number): t.view(-1).view(torch.uint8) for number, t in tensors.items()})


def clone(inputs: Inputs) -> Inputs:
    """The same arguments with the same content at other addresses."""
    return inputs_of([value.clone() if isinstance(value, torch.Tensor) else value for value in inputs.args])


def try_once(ready: Prepared, inputs: Inputs) -> list[Key]:
    """Run the reference and hold its outputs against the Definition; the buffers of the inputs that it wrote to.

    What it wrote is put back.
    """
    saved = clone(inputs)
    before = {key: inputs.args[key[1]]._version for key in inputs.buffers}
    outputs = outputs_of(ready.definition, ready.reference(*inputs.args))
    for name, output in outputs.items():
        check_output(ready.definition, ready.made.axes, name, output)
    written = [key for key, version in before.items() if inputs.args[key[1]]._version != version]
    for key in written:
        inputs.buffers[key].copy_(saved.buffers[key])
    return written

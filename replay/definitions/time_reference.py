"""Time one reference in this process: make its inputs, see which of them it writes to, run the clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kcap.replay.definitions.outputs import check_output, outputs_of
from kcap.replay.definitions.prepared import Prepared, order
from kcap.replay.definitions.run_reference import attempt
from kcap.replay.inputs import Inputs
from kcap.replay.memory import Key
from kcap.replay.roles import named
from kcap.replay.roofline.judging import work
from kcap.replay.roofline.workloads import cost_of
from kcap.replay.runner import How, report
from kcap.replay.timing import clocks
from kcap.replay.timing.clock import time_on
from kcap.replay.timing.rotation import Rotation, Size
from kcap.schemas.measurement import Cache


def run(session: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Measurement that this decides; no error of the inputs or of the reference leaves here."""
    return attempt(session, request, partial(measure, session["device"], How.of(session)))


def measure(device: str, how: How, ready: Prepared, request: dict[str, Any]) -> dict[str, Any]:
    """Times of a reference that runs; ValueError for outputs that are not the Definition's."""
    torch.manual_seed(request["seed"])
    with torch.inference_mode():
        first = inputs_of(ready.arguments)
        written = try_once(ready, first)
        rotation = rotation_of(how.cache, ready, first, device)
        before = clocks.read(device)
        timing = time_on(device, ready.reference, first, rotation, written, request["seconds"], how.kernels)
    told = report(replace(timing, notes=[*ready.notes, *timing.notes]), first.total, first.total, device, before)
    inputs = dict(zip(ready.definition.inputs, ready.made.inputs, strict=True))
    return {**told, "work": work(cost_of(ready.definition, inputs), first.total - rotation.rotating)}


def rotation_of(cache: Cache, ready: Prepared, first: Inputs, device: str) -> Rotation:
    """What goes round in the state `cache`; weights and caches are what the Definition names so."""
    names = [name.lower() for name in order(ready.definition)]
    moved = {place for _, place in first.buffers if named(names[place], product="a" in names)}
    size = sum(len(buffer) for (_, place), buffer in first.buffers.items() if place in moved)
    whole, copied = Size(first.total, first.total), partial(clone, first)
    return Rotation.of(cache, whole, Size(size, size), copied, partial(copied, moved), device)


def inputs_of(arguments: list[Any]) -> Inputs:
    """`arguments`, and each tensor's bytes under its device and place."""
    args = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in arguments]
    tensors = {number: value for number, value in enumerate(args) if isinstance(value, torch.Tensor)}
    return Inputs(args, {}, {(str(t.device), number): t.view(-1).view(torch.uint8) for number, t in tensors.items()})


def clone(inputs: Inputs, moved: Collection[int] | None = None) -> Inputs:
    """The same arguments with the same content at other addresses: all, or those at the places `moved`."""
    copied = range(len(inputs.args)) if moved is None else moved
    args = [a.clone() if isinstance(a, torch.Tensor) and n in copied else a for n, a in enumerate(inputs.args)]
    return inputs_of(args)


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

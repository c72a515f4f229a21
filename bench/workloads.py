"""From a Call and one Sample to a Workload: sizes of the variable axes, scalars, and the values of index inputs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson
import torch

from kcap.replay import indices, rules
from kcap.replay.bind import Bound, bind
from kcap.replay.describe import described
from kcap.replay.job import SEED
from kcap.replay.launches import is_launch, launch_rule
from kcap.replay.rebuild import prepare
from kcap.replay.skip import Skip
from kcap.schemas.dataset import WorkloadCount, blob_path
from kcap.schemas.definition import Definition
from kcap.schemas.families.derive import Use
from kcap.schemas.families.form import Form
from kcap.schemas.families.invocation import Unrecognized, torch_dtype
from kcap.schemas.recording import Recording
from kcap.schemas.records import Call, Sample
from kcap.schemas.workload import Input, RandomInput, SafetensorsInput, ScalarInput, Workload

NAMESPACE = uuid.UUID("6f0d2a52-7f7b-5d0e-9a51-0d2f6c1b7c11")  # of kcap's Workloads: equal ones get equal ids
UNKNOWN = "its integer input {} was not sampled, and other values could be invalid"


@dataclass(frozen=True)
class Made:
    """A Workload, the tensors of its blob by key, and what it stands for."""

    workload: Workload
    blob: dict[str, torch.Tensor]
    count: WorkloadCount


def make(definition: Definition, use: Use, sample: Sample | None, recording: Recording | None) -> Made:
    """The Workload of `use` on `sample`, the same whenever it is made; Skip or Unrecognized where one cannot be."""
    torch.default_generator.manual_seed(SEED)
    form = use.bind(described(decided(use.call, sample, recording), use.call.launch))
    values = {name: slot.get() for name, slot in form.inputs.items()}
    if use.call.namespace != "aten":
        check_known(form, values)
    return _finish(definition, form, values, use.call)


def decided(call: Call, sample: Sample | None, recording: Recording | None) -> Bound:
    """`call` with the values of `sample`, its caches cut to the pages in use, and nothing allocated.

    Skip if a value is not known.
    """
    bound = bind(call, sample, None, recording.value if recording else lambda _: None)
    prepare(bound, launch_rule(call, recording) if is_launch(call) else rules.find(call.operator))
    indices.fill_indices(bound)
    return bound


def check_known(form: Form, values: dict[str, Any]) -> None:
    """Skip where an integer input has no values: only of aten's operators is it known which of them are indices."""
    for name, value in values.items():
        unknown = isinstance(value, torch.Tensor) and value.is_meta and value.numel()
        if unknown and form.inputs[name].dtype in ("int32", "int64"):
            raise Skip(UNKNOWN.format(name))


def _finish(definition: Definition, form: Form, values: dict[str, Any], call: Call) -> Made:
    known = {n: value for n, value in values.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    blob = {name: value.to(torch_dtype(form.inputs[name].dtype)) for name, value in known.items()}
    sizes = form.sizes(values)
    axes = {name: sizes[name] for name in definition.var_axes}
    plain = {name: _plain(name, values[name]) for name in form.inputs if name not in blob}
    digest = _digest(definition, axes, plain, blob)
    path = f"./{blob_path(definition, digest)}"
    stored = {name: SafetensorsInput(path=path, tensor_key=name) for name in blob}
    inputs: dict[str, Input] = {name: stored.get(name) or plain[name] for name in form.inputs}
    count = WorkloadCount(
        definition=definition.name,
        workload=digest,
        operator=call.operator,
        call=call.id,
        counts=call.counts,
    )
    return Made(Workload(axes=axes, inputs=inputs, uuid=digest), blob, count)


def _plain(name: str, value: Any) -> Input:
    if isinstance(value, torch.Tensor):
        return RandomInput()
    if isinstance(value, bool | int | float):
        return ScalarInput(value=value)
    raise Unrecognized(f"the value of {name} is not known ({value!r})")


def _digest(definition: Definition, axes: dict[str, int], plain: dict[str, Input], blob: dict[str, Any]) -> str:
    """An id that equal Workloads share."""
    content = {name: sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in blob.items()}
    given = {name: one.model_dump() for name, one in plain.items()}
    text = orjson.dumps([definition.name, axes, given, content], option=orjson.OPT_SORT_KEYS)
    return str(uuid.uuid5(NAMESPACE, text.decode()))

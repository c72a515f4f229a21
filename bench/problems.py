"""What a benchmark is made of: each Definition with its Workloads, from a Recording or a dataset alike.

A Workload is made of a Call and one Sample: sizes of the variable axes, scalars, and the values of index inputs.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson
import torch

from kcap.bench.contents import Contents
from kcap.errors import FormatError
from kcap.replay.jobs import SEED
from kcap.replay.rebuild import rebuild
from kcap.replay.rebuild.launches import is_launch, launch_rule
from kcap.replay.rebuild.rebuild import apply_rule, name_arguments
from kcap.replay.source import Samples, group_samples, needs_sample, samples_by_call
from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall, Skip, bind_call, invocation_of_bound
from kcap.schemas.derive.derive import Derived, derive_calls
from kcap.schemas.derive.invocation import Unrecognized, torch_dtype
from kcap.schemas.derive.kernel import CallUse, DerivedDefinition, KernelInstance
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount, blob_path, invocations
from kcap.schemas.flashinfer.definition import (
    Definition,
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    Workload,
    WorkloadInput,
    check_workload,
)
from kcap.schemas.recording.operators import base_of
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.results.export_loss import LossLedger
from kcap.schemas.validation.dataset import check_blobs

IN_REGION = "part of {}, which is exported whole"
IN_LOST_REGION = "part of {}, whose inputs are not known"
UNSAMPLED = "some of its Samples: {}"


@dataclass
class Problem:
    """A Definition with its Workloads. `blobs`: the tensors of a Workload, by its uuid and the input's name."""

    definition: Definition
    family: str = ""
    workloads: dict[str, Workload] = field(default_factory=dict)
    blobs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    counts: list[WorkloadCount] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Invocations that its Workloads stand for."""
        return invocations(self.counts)[self.definition.name]

    def add(self, workloads: Sequence[RecordedWorkload]) -> None:
        """The Workloads of one Call's Samples."""
        for recorded in workloads:
            self.workloads[recorded.workload.uuid] = recorded.workload
            if recorded.blob:
                self.blobs[recorded.workload.uuid] = recorded.blob
            self.counts.append(recorded.count.model_copy(update={"samples": len(workloads)}))


@dataclass(frozen=True)
class Problems:
    """All Problems of a Recording (with what they were derived from) or of a dataset, and what has none."""

    problems: list[Problem]
    ledger: LossLedger
    derived: Derived | None = None


def problems_of(contents: Contents, engine_forms: bool = False) -> Problems:
    """A Recording's Definitions and Workloads, derived; a dataset's, as they are.

    `engine_forms`: also those whose inputs are the engine's own; their Calls then are in two Problems.
    """
    if contents.dataset is not None:
        return Problems(problems_of_dataset(contents.dataset), LossLedger())
    ledger = LossLedger()
    derived = derive_calls(contents.calls, contents.metadata, contents.recording)
    samples = samples_by_call(contents.samples)
    problems = [problem for kernel in derived.kernels if (problem := _problem(kernel, samples, contents, ledger))]
    if engine_forms:  # what cannot be made of them was told of their Calls already
        forms = (_problem(kernel, samples, contents, LossLedger()) for kernel in derived.engine_forms)
        problems += [problem for problem in forms if problem]
    _lose_the_rest(derived, problems, {call.id: call for call in contents.kernels}, ledger)
    return Problems(problems, ledger, derived)


def problems_of_dataset(dataset: Dataset) -> list[Problem]:
    """Blobs are read where they are there."""
    counts = defaultdict(list)
    for count in dataset.counts:
        counts[count.definition].append(count)
    return [
        Problem(
            definition,
            workloads={workload.uuid: workload for workload in dataset.workloads.get(name, [])},
            blobs=_read_blobs(dataset, definition, dataset.workloads.get(name, [])),
            counts=counts[name],
        )
        for name, definition in dataset.definitions.items()
    ]


def _read_blobs(
    dataset: Dataset, definition: Definition, workloads: Sequence[Workload]
) -> dict[str, Mapping[str, Any]]:
    """By Workload and input; FormatError for a tensor that is not its input's, before it is read."""
    blobs: dict[str, Mapping[str, Any]] = {}
    for workload in workloads:
        stored = {name: value for name, value in workload.inputs.items() if isinstance(value, SafetensorsInput)}
        whole = stored and all(dataset.blob_file(value).is_file() for value in stored.values())
        if whole and not check_workload(definition, workload):
            for reason in check_blobs(dataset, definition, workload):
                raise FormatError(str(dataset.root), f"{definition.name} {workload.uuid}: {reason}")
            blobs[workload.uuid] = {name: dataset.blob(value) for name, value in stored.items()}
    return blobs


def distinct_samples(call: Call, samples: Samples) -> list[Sample | None]:
    """The Samples of `call` that differ, or None alone for one that needs none or has none.

    Samples without values of tensors (those of profiled steps) stand back where others have some.
    """
    if not needs_sample(call):
        return [None]
    of_call = samples.get(call.id, [])
    with_values = [(index, sample) for index, sample in of_call if sample.tensors]
    return [group.sample for group in group_samples(with_values or of_call)]


def _problem(kernel: DerivedDefinition, samples: Samples, contents: Contents, ledger: LossLedger) -> Problem | None:
    """The Problem of `kernel`; None if no Workload of it could be made."""
    problem = Problem(kernel.definition, kernel.family)
    for use in kernel.uses:
        _add_workloads(problem, use, distinct_samples(use.call, samples), contents, ledger)
    return problem if problem.workloads else None


def _add_workloads(
    problem: Problem, use: CallUse, samples: list[Sample | None], contents: Contents, ledger: LossLedger
) -> None:
    """A Workload for each Sample; those that cannot be made are told once for the Call."""
    workloads, reason = [], ""
    for sample in samples:
        try:
            workloads.append(make_workload(problem.definition, use, sample, contents.recording))
        except families.REFUSALS as error:
            reason = families.why_not_taken(error)
    problem.add(workloads)
    if reason and use.call.kind == "kernel":
        record = ledger.reduce if workloads else ledger.lose
        record(use.call.operator, UNSAMPLED.format(reason) if workloads else reason, use.call.total)


def _lose_the_rest(
    derived: Derived, problems: Sequence[Problem], calls: Mapping[int, Call], ledger: LossLedger
) -> None:
    exported = {base_of(count.operator) for problem in problems for count in problem.counts}
    for number, reason in derived.refused.items():
        ledger.lose(calls[number].operator, reason, calls[number].total)
    for number, family in derived.covered.items():
        call = calls[number]
        whole = base_of(call.parent or "") in exported
        record, reason = (ledger.reduce, IN_REGION) if whole else (ledger.lose, IN_LOST_REGION)
        record(call.operator, reason.format(family), call.total)


WORKLOAD_NAMESPACE = uuid.UUID("6f0d2a52-7f7b-5d0e-9a51-0d2f6c1b7c11")  # of kcap's Workloads: equal ones get equal ids
UNKNOWN_INDICES = "its integer input {} was not sampled, and other values could be invalid"


@dataclass(frozen=True)
class RecordedWorkload:
    """A Workload, the tensors of its blob by key, and what it stands for."""

    workload: Workload
    blob: dict[str, torch.Tensor]
    count: WorkloadCount


def make_workload(
    definition: Definition, use: CallUse, sample: Sample | None, recording: Recording | None
) -> RecordedWorkload:
    """The Workload of `use` on `sample`, the same whenever it is made; Skip or Unrecognized where one cannot be."""
    torch.default_generator.manual_seed(SEED)
    form = use.bind(invocation_of_bound(bound_call(use.call, sample, recording), use.call.launch))
    values = {name: slot.get() for name, slot in form.inputs.items()}
    if use.call.namespace != "aten" and not use.call.group:  # integers that a collective moves are but numbers to it
        check_indices_known(form, values)
    return _recorded_workload(definition, form, values, use.call)


def bound_call(call: Call, sample: Sample | None, recording: Recording | None) -> BoundCall:
    """`call` with the values of `sample`, its caches cut to the pages in use, and nothing allocated.

    Packed weights stay without values: who reads the Workload draws them. Skip if a value is not known.
    """
    bound = bind_call(call, sample, None, recording.value if recording else lambda _: None)
    rule = launch_rule(call, recording) if is_launch(call) else families.replay_rule_for(call.operator)
    name_arguments(bound, rule)
    apply_rule(bound, rule)
    rebuild.resolve_indices(bound)
    for path in bound.drawn:
        del bound.contents[path]
    return bound


def check_indices_known(form: KernelInstance, values: dict[str, Any]) -> None:
    """Skip where an integer input has no values: only of aten's operators is it known which of them are indices."""
    for name, value in values.items():
        unknown = isinstance(value, torch.Tensor) and value.is_meta and value.numel()
        if unknown and form.inputs[name].dtype in ("int32", "int64") and not form.inputs[name].any_bits:
            raise Skip(UNKNOWN_INDICES.format(name))


def _recorded_workload(
    definition: Definition, form: KernelInstance, values: dict[str, Any], call: Call
) -> RecordedWorkload:
    tensors = {n: value for n, value in values.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    blob = {name: value.to(torch_dtype(form.inputs[name].dtype)) for name, value in tensors.items()}
    sizes = form.sizes(values)
    axes = {name: sizes[name] for name in definition.var_axes}
    plain = {name: _plain_input(name, values[name]) for name in form.inputs if name not in blob}
    digest = _workload_id(definition, axes, plain, blob)
    path = f"./{blob_path(definition, digest)}"
    stored = {name: SafetensorsInput(path=path, tensor_key=name) for name in blob}
    inputs: dict[str, WorkloadInput] = {name: stored.get(name) or plain[name] for name in form.inputs}
    count = WorkloadCount(
        definition=definition.name,
        workload=digest,
        operator=call.operator,
        call=call.id,
        counts=call.counts,
    )
    return RecordedWorkload(Workload(axes=axes, inputs=inputs, uuid=digest), blob, count)


def _plain_input(name: str, value: Any) -> WorkloadInput:
    if isinstance(value, torch.Tensor):
        return RandomInput()
    if isinstance(value, bool | int | float):
        return ScalarInput(value=value)
    raise Unrecognized(f"the value of {name} is not known ({value!r})")


def _workload_id(
    definition: Definition, axes: dict[str, int], plain: dict[str, WorkloadInput], blob: dict[str, Any]
) -> str:
    """An id that equal Workloads share."""
    content = {name: sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in blob.items()}
    inputs = {name: value.model_dump() for name, value in plain.items()}
    text = orjson.dumps([definition.name, axes, inputs, content], option=orjson.OPT_SORT_KEYS)
    return str(uuid.uuid5(WORKLOAD_NAMESPACE, text.decode()))

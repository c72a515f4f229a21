"""What a benchmark is made of: each Definition with its Workloads, from a Recording or a dataset alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.contents import Contents
from kcap.bench.workloads import Made, make
from kcap.errors import FormatError
from kcap.replay.skip import Skip
from kcap.replay.source import Samples, by_call, group, needs_sample
from kcap.schemas.dataset import Dataset, WorkloadCount, invocations
from kcap.schemas.definition import Definition
from kcap.schemas.families.derive import Derived, Kernel, Use, derive_calls
from kcap.schemas.families.invocation import Unrecognized, base_of
from kcap.schemas.loss import LossLedger
from kcap.schemas.records import Call, Sample
from kcap.schemas.validation.blobs import check_blobs
from kcap.schemas.workload import SafetensorsInput, Workload, check_workload

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

    def add(self, made: Sequence[Made]) -> None:
        """The Workloads of one Call's Samples."""
        for one in made:
            self.workloads[one.workload.uuid] = one.workload
            if one.blob:
                self.blobs[one.workload.uuid] = one.blob
            self.counts.append(one.count.model_copy(update={"samples": len(made)}))


@dataclass(frozen=True)
class Problems:
    """All Problems of a Recording (with what they were derived from) or of a dataset, and what has none."""

    problems: list[Problem]
    ledger: LossLedger
    derived: Derived | None = None


def problems_of(contents: Contents) -> Problems:
    """A Recording's Definitions and Workloads, derived; a dataset's, as they are."""
    if contents.dataset is not None:
        return Problems(of_dataset(contents.dataset), LossLedger())
    ledger = LossLedger()
    working = ledger.working(contents.kernels)
    derived = derive_calls(contents.calls, contents.metadata, contents.recording)
    samples = by_call(contents.samples)
    problems = [problem for kernel in derived.kernels if (problem := _problem(kernel, samples, contents, ledger))]
    _lose_the_rest(derived, problems, {call.id: call for call in working}, ledger)
    return Problems(problems, ledger, derived)


def of_dataset(dataset: Dataset) -> list[Problem]:
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


def _read_blobs(dataset: Dataset, definition: Definition, given: Sequence[Workload]) -> dict[str, Mapping[str, Any]]:
    """By Workload and input; FormatError for a tensor that is not its input's, before it is read."""
    found: dict[str, Mapping[str, Any]] = {}
    for workload in given:
        stored = {name: one for name, one in workload.inputs.items() if isinstance(one, SafetensorsInput)}
        whole = stored and all(dataset.blob_file(one).is_file() for one in stored.values())
        if whole and not check_workload(definition, workload):
            for reason in check_blobs(dataset, definition, workload):
                raise FormatError(str(dataset.root), f"{definition.name} {workload.uuid}: {reason}")
            found[workload.uuid] = {name: dataset.blob(one) for name, one in stored.items()}
    return found


def samples_of(call: Call, samples: Samples) -> list[Sample | None]:
    """The Samples of `call` that differ, or None alone for one that needs none or has none.

    Samples without values of tensors (those of profiled steps) stand back where others have some.
    """
    if not needs_sample(call):
        return [None]
    found = samples.get(call.id, [])
    return [one.sample for one in group([(i, one) for i, one in found if one.tensors] or found)]


def _problem(kernel: Kernel, samples: Samples, contents: Contents, ledger: LossLedger) -> Problem | None:
    """The Problem of `kernel`; None if no Workload of it could be made."""
    problem = Problem(kernel.definition, kernel.family)
    for use in kernel.uses:
        _add_workloads(problem, use, samples_of(use.call, samples), contents, ledger)
    return problem if problem.workloads else None


def _add_workloads(
    problem: Problem, use: Use, samples: list[Sample | None], contents: Contents, ledger: LossLedger
) -> None:
    """A Workload for each Sample; those that cannot be made are told once for the Call."""
    made, reason = [], ""
    for sample in samples:
        try:
            made.append(make(problem.definition, use, sample, contents.recording))
        except (Skip, Unrecognized) as error:
            reason = str(error)
    problem.add(made)
    if reason and use.call.kind == "kernel":
        tell = ledger.reduce if made else ledger.lose
        tell(use.call.operator, UNSAMPLED.format(reason) if made else reason, use.call.total)


def _lose_the_rest(
    derived: Derived, problems: Sequence[Problem], calls: Mapping[int, Call], ledger: LossLedger
) -> None:
    exported = {base_of(count.operator) for problem in problems for count in problem.counts}
    for number, reason in derived.refused.items():
        ledger.lose(calls[number].operator, reason, calls[number].total)
    for number, family in derived.covered.items():
        call = calls[number]
        whole = base_of(call.parent or "") in exported
        tell, reason = (ledger.reduce, IN_REGION) if whole else (ledger.lose, IN_LOST_REGION)
        tell(call.operator, reason.format(family), call.total)

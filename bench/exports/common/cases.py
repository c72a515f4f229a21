"""Problems for targets that take them one by one, and the account of those that a target cannot take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcap.bench.contents import Contents
from kcap.bench.problems import Problem, Problems, problems_of
from kcap.schemas.flashinfer.definition import (
    Definition,
    DefinitionTensor,
    SafetensorsInput,
    Workload,
    WorkloadInput,
    check_workload,
)
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

NO_BLOB = "its recorded values are not in the dataset"
SAMPLES = "all Samples but one of each Call"


@dataclass(frozen=True)
class Case:
    """One Workload of a Definition and the Calls that it stands for: invocations by the Call's id and operator."""

    definition: Definition
    workload: Workload
    blob: Mapping[str, Any]
    calls: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.calls.values())

    def tensors(self) -> Iterator[tuple[str, DefinitionTensor, WorkloadInput | None]]:
        """Each input: its name, what the Definition says of it, and what the Workload gives (None: left out)."""
        for name, tensor in self.definition.inputs.items():
            yield name, tensor, self.workload.inputs.get(name)

    def sizes(self, tensor: DefinitionTensor) -> tuple[int, ...]:
        return self.definition.sizes(tensor.shape or [], self.workload.axes)

    def misfit(self) -> str | None:
        """Why it is no instance of its Definition."""
        return next(iter(check_workload(self.definition, self.workload)), None)

    def lacks_blob(self) -> bool:
        return any(
            isinstance(workload_input, SafetensorsInput) and name not in self.blob
            for name, _, workload_input in self.tensors()
        )


def cases(problem: Problem, samples: bool) -> list[Case]:
    """The most often invoked first. With `samples` every Workload, else one for each Call.

    A Workload without counts counts as one, or as none where its Definition has others with counts.
    """
    by_workload = _counted(problem, samples)
    named = {count.workload for count in problem.counts}
    for number, uuid in enumerate(uuid for uuid in problem.workloads if uuid not in named):
        by_workload[uuid] = _case(problem, uuid)
        if not problem.counts:
            by_workload[uuid].calls[number, problem.definition.name] = 1
    return sorted(by_workload.values(), key=lambda case: (-case.count, case.workload.uuid))


def _counted(problem: Problem, samples: bool) -> dict[str, Case]:
    """By Workload. A Call counts with the first of its Workloads, once where several of its Samples are that one."""
    by_workload: dict[str, Case] = {}
    seen: set[tuple[int, str]] = set()
    for count in problem.counts:
        call = (count.call, count.operator)
        if call not in seen or samples:
            case = by_workload.setdefault(count.workload, _case(problem, count.workload))
            case.calls.setdefault(call, 0 if call in seen else sum(phase.count for phase in count.counts))
        seen.add(call)
    return by_workload


def _case(problem: Problem, uuid: str) -> Case:
    return Case(problem.definition, problem.workloads[uuid], problem.blobs.get(uuid, {}))


class Account:
    """Cases of `contents` that a target takes, and what becomes of the counts of the others.

    A kernel in a region that is exported whole is lost if no case of that region is taken.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.problems: Problems = problems_of(contents)
        self.regions = {call.id for call in contents.calls if call.kind == "region"}
        self.taken: set[str] = set()  # operators of regions
        self.refused: dict[str, str] = {}  # operators of regions, and why

    @property
    def ledger(self) -> LossLedger:
        return self.problems.ledger

    def taken_cases(self, refuse: Callable[[Case], str | None], samples: bool) -> Iterator[Case]:
        """The cases that are instances of their Definition and for which `refuse` gives no reason."""
        for problem in self.problems.problems:
            for case in cases(problem, samples):
                reason = case.misfit() or refuse(case)
                self._book(case, reason)
                if reason is None:
                    yield case

    def _book(self, case: Case, reason: str | None) -> None:
        for (number, operator), count in case.calls.items():
            if number in self.regions and reason is None:
                self.taken.add(operator)
            elif number in self.regions:
                self.refused[operator] = reason or ""
            elif reason is not None and count:
                self.ledger.lose(operator, reason, count)

    def loss(self, target: str) -> ExportLoss:
        covered = self.problems.derived.covered if self.problems.derived else {}
        calls = {call.id: call for call in self.contents.kernels}
        for number, region in covered.items():
            if region in self.refused and region not in self.taken:
                self.ledger.lose(calls[number].operator, self.refused[region], calls[number].total)
        return self.ledger.loss(target, self.contents.total)

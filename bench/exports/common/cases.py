"""Problems for targets that take them one by one, and the account of those that a target cannot take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from kcap.bench.check.draws import TargetDraw, draw_bounded
from kcap.bench.check.verification import Checkers, Draws, WorkloadDraw, check_draws
from kcap.bench.exports import ExportRequest
from kcap.bench.problems import Problem, Problems, problems_of
from kcap.schemas.backendbench.convert import SHAPES
from kcap.schemas.flashinfer.dataset import blob_path
from kcap.schemas.flashinfer.definition import (
    Definition,
    DefinitionTensor,
    SafetensorsInput,
    Workload,
    WorkloadInput,
    check_workload,
)
from kcap.schemas.recording.operators import base_of
from kcap.schemas.results.export_loss import ExportLoss, LossLedger
from kcap.system import machine

NO_BLOB = "its recorded values are not in the dataset"
SAMPLES = "all Samples but one of each Call"
BOUNDED = "standard normal inputs: its reference is not defined on all of them, so some are drawn from 0.05 to 0.95"
MAX_BOUNDED = 64 << 20  # bytes of inputs of the bounded draw in one Workload


@dataclass(frozen=True)
class Case:
    """One Workload of a Definition and the Calls that it stands for: invocations by the Call's id and operator.

    `bounded`: the inputs on whose standard normal numbers the reference gives nothing that could be compared.
    """

    definition: Definition
    workload: Workload
    blob: Mapping[str, Any]
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    bounded: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return sum(self.calls.values())

    def tensors(self) -> Iterator[tuple[str, DefinitionTensor, WorkloadInput | None]]:
        """Each input: its name, what the Definition says of it, and what the Workload gives (None: left out)."""
        for name, tensor in self.definition.inputs.items():
            yield name, tensor, self.workload.inputs.get(name)

    def sizes(self, tensor: DefinitionTensor) -> tuple[int, ...]:
        return self.definition.sizes(tensor.shape or [], self.workload.axes)

    def with_bounded_stored(self) -> Case:
        """The same with the `bounded` inputs drawn once, for its blob."""
        generator = torch.Generator().manual_seed(int(sha256(self.workload.uuid.encode()).hexdigest()[:8], 16))
        sizes = {name: self.sizes(self.definition.inputs[name]) for name in self.bounded}
        drawn = {n: draw_bounded(size, self.definition.inputs[n].dtype, generator) for n, size in sizes.items()}
        path = f"./{blob_path(self.definition, self.workload.uuid)}"
        stored = {name: SafetensorsInput(path=path, tensor_key=name) for name in drawn}
        workload = self.workload.model_copy(update={"inputs": {**self.workload.inputs, **stored}})
        return replace(self, workload=workload, blob={**self.blob, **drawn}, bounded=())

    def bounded_too_large(self) -> str | None:
        """Why the `bounded` inputs cannot be stored."""
        size = sum(4 * math.prod(self.sizes(self.definition.inputs[name])) for name in self.bounded)
        most = f"more than {MAX_BOUNDED >> 20} MiB of inputs"
        return (
            f"on random inputs its reference gives nan or inf, and others take {most}" if size > MAX_BOUNDED else None
        )

    def misfit(self) -> str | None:
        """Why it is no instance of its Definition."""
        return next(iter(check_workload(self.definition, self.workload)), None)

    @property
    def level(self) -> int:
        """1 for one operator, 2 for what a Definition's tags call fused."""
        return 2 if any(tag.startswith("fused") for tag in self.definition.tags) else 1

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

    A kernel in a region that is exported whole is lost if no case of that region is taken. `draw`: the random inputs
    that the references of a Recording are tried on; None where the target runs none. `problems`: those of `contents`
    that are wanted; None for all. `checkers`: those of `contents` where there are some already.
    """

    def __init__(
        self,
        request: ExportRequest,
        draw: TargetDraw | None,
        problems: Problems | None = None,
        checkers: Checkers | None = None,
    ) -> None:
        self.contents = contents = request.contents
        self.problems: Problems = problems_of(contents) if problems is None else problems
        derived = self.problems.derived
        self.draws: Draws = {}
        if draw is not None and request.check and derived is not None and contents.recording is not None:
            on = request.checked_on
            if on.device is None and not machine.has_gpu():
                on = replace(on, device="cpu")  # a reference is torch alone
            with nullcontext(checkers) if checkers else Checkers(contents, on) as checking:
                self.draws = check_draws(checking, derived, draw)
        self.regions = {call.id for call in contents.calls if call.kind == "region"}
        self.rounded = {call.id for call in contents.calls if call.shapes > 1}
        self.taken: set[str] = set()  # operators of regions
        self.refused: dict[str, str] = {}  # operators of regions, and why

    @property
    def ledger(self) -> LossLedger:
        return self.problems.ledger

    def taken_cases(self, refuse: Callable[[Case], str | None], samples: bool) -> Iterator[Case]:
        """The cases that are instances of their Definition and for which `refuse` gives no reason."""
        for problem in self.problems.problems:
            for case in cases(problem, samples):
                draw = self._draw(case)
                case = replace(case, bounded=draw.bounded)
                reason = case.misfit() or draw.refused or refuse(case)
                self._book(case, reason)
                if reason is None:
                    yield case

    def _draw(self, case: Case) -> WorkloadDraw:
        name, whole = case.definition.name, self.draws.get((case.definition.name, None), WorkloadDraw())
        return self.draws.get((name, case.workload.uuid), whole)

    def with_stored_draws(self, case: Case) -> Case:
        """`case` with its `bounded` inputs stored, which the ledger is told."""
        if not case.bounded:
            return case
        self.reduce(case, BOUNDED)
        return case.with_bounded_stored()

    def reduce(self, case: Case, reason: str) -> None:
        """`case` is taken, but for what `reason` says."""
        for (number, operator), count in case.calls.items():
            if number not in self.regions and count:
                self.ledger.reduce(operator, reason, count)

    def _book(self, case: Case, reason: str | None) -> None:
        for (number, operator), count in case.calls.items():
            if number in self.regions and reason is None:
                self.taken.add(operator)
            elif number in self.regions:
                self.refused[operator] = reason or ""
            elif reason is not None and count:
                self.ledger.lose(operator, reason, count)
            elif number in self.rounded:
                self.ledger.reduce(operator, SHAPES, count)

    def loss(self, target: str) -> ExportLoss:
        covered = self.problems.derived.covered if self.problems.derived else {}
        taken, refused = set(map(base_of, self.taken)), {base_of(name): why for name, why in self.refused.items()}
        for call in self.contents.kernels:
            region = base_of(call.parent or "")
            if call.id in covered and region in refused and region not in taken:
                self.ledger.lose(call.operator, refused[region], call.total)
        return self.ledger.loss(target, self.contents.total)

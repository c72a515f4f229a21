"""Check the references of a Recording's Definitions, and tag each Definition by what came of it.

A Definition is `status:verified` where its reference agreed with the recorded operator on every Call that was tried,
and at least one could be; otherwise it stays `status:draft`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast

from kcap.bench.check.checker import CheckRequest
from kcap.bench.check.draws import DrawAnswer, TargetDraw
from kcap.bench.contents import CheckTarget, Contents
from kcap.bench.problems import Problem, distinct_samples
from kcap.replay.group.workers import GroupedWorker
from kcap.replay.jobs import SEED
from kcap.replay.source import Samples, home_device, registered_operators, samples_by_call
from kcap.schemas.derive.derive import Derived
from kcap.schemas.derive.kernel import DerivedDefinition
from kcap.schemas.flashinfer.definition import DRAFT, VERIFIED, Definition
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.results.outcome import ReferenceCheck
from kcap.system.worker_process import Worker

CHECK_WORKER = "kcap.bench.check.worker"
TIMEOUT_S = 300.0
T = TypeVar("T")


class Checkers:
    """Processes that check `contents`, side by side, with the cores shared out: one for every four cores, four at most.
    Each starts when it is needed, and anew after a crash."""

    def __init__(self, contents: Contents, on: CheckTarget) -> None:
        self.samples = samples_by_call(contents.samples)
        cores = len(os.sched_getaffinity(0))
        count = min(max(cores // 4, 1), 4)
        session = _session(contents, on, max(cores // count, 1))
        self._workers = [GroupedWorker(session, CHECK_WORKER, timeout_option=None) for _ in range(count)]

    def __enter__(self) -> Checkers:
        return self

    def __exit__(self, *failure: object) -> None:
        for worker in self._workers:
            worker.__exit__(*failure)

    def map(self, check: Callable[[Worker, DerivedDefinition], T], kernels: Iterable[DerivedDefinition]) -> Iterator[T]:
        """What `check` says of each of `kernels`, in their order."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def run(kernel: DerivedDefinition) -> T:
            worker = idle.get()
            try:
                return check(worker, kernel)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers))
        try:
            yield from pool.map(run, kernels)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def check_references(checkers: Checkers, derived: Derived) -> Iterator[ReferenceCheck]:
    """The checks of all Definitions of a Recording."""

    def check(worker: Worker, kernel: DerivedDefinition) -> list[ReferenceCheck]:
        checks = []
        for call in calls_to_check([use.call for use in kernel.uses]):
            answer = worker.run(_request(kernel, call, distinct_samples(call, checkers.samples)[0]), TIMEOUT_S)
            name = kernel.definition.name
            checks.append(ReferenceCheck(definition=name, operator=call.operator, call=call.id, **answer))
        return checks

    for checks in checkers.map(check, derived.kernels):
        yield from checks


@dataclass(frozen=True)
class WorkloadDraw:
    """The inputs of a Workload that need the bounded draw, or why the target's random inputs cannot be compared."""

    bounded: tuple[str, ...] = ()
    refused: str | None = None


Draws: TypeAlias = dict[tuple[str, str | None], WorkloadDraw]  # by Definition and Workload (None: all of it)


def check_draws(checkers: Checkers, derived: Derived, target: TargetDraw) -> Draws:
    """The Workloads on which a reference gives nothing that `target` could compare, on inputs that it draws.

    Of each Definition the smallest, a middle and the largest Call are tried; the others if one of these stands out.
    """

    def check(worker: Worker, kernel: DerivedDefinition) -> Draws:
        calls = [use.call for use in kernel.uses]
        first = calls_to_check(calls)
        if not (draws := _try_calls(worker, kernel, first, checkers.samples, target)):
            return draws
        rest = [call for call in calls if call not in first]
        return draws | _try_calls(worker, kernel, rest, checkers.samples, target)

    return {key: draw for draws in checkers.map(check, derived.kernels) for key, draw in draws.items()}


def _try_calls(
    worker: Worker, kernel: DerivedDefinition, calls: list[Call], samples: Samples, target: TargetDraw
) -> Draws:
    """Those of `calls` that stand out."""
    draws: Draws = {}
    for call in calls:
        for sample in distinct_samples(call, samples):
            request = {**_request(kernel, call, sample), **asdict(target)}
            answer = cast(DrawAnswer, worker.run(request, TIMEOUT_S))
            key, bounded = (kernel.definition.name, answer.get("workload")), answer.get("bounded")
            if bounded:
                draws[key] = WorkloadDraw(bounded=tuple(bounded))
            elif answer["status"] == "refused":
                draws[key] = WorkloadDraw(refused=answer["reason"])
    return draws


def _session(contents: Contents, on: CheckTarget, threads: int) -> dict[str, Any]:
    return {
        "device": on.device,
        "home": home_device(contents.calls),
        "root": str(contents.path.resolve()),
        "operators": registered_operators(contents.calls),
        "threads": threads,
        "trust": on.trust,
    }


def _request(kernel: DerivedDefinition, call: Call, sample: Sample | None) -> CheckRequest:
    fields = sample.model_dump(mode="json") if sample else None
    request = CheckRequest(definition=kernel.definition.name, call=call.id, sample=fields, seed=SEED)
    if call.group:
        request["ranks"] = call.group.size
    return request


def calls_to_check(calls: list[Call]) -> list[Call]:
    """At most three Calls of different size."""
    ordered = sorted(calls, key=lambda call: (sum(spec.numel for _, spec in call.tensors()), call.id))
    return [ordered[i] for i in sorted({0, len(ordered) // 2, len(ordered) - 1})]


def tag_definitions(problems: Iterable[Problem], checks: Iterable[ReferenceCheck]) -> None:
    """Give each Problem's Definition the status that its checks earned."""
    statuses: dict[str, set[str]] = {}
    for check in checks:
        statuses.setdefault(check.definition, set()).add(check.status)
    for problem in problems:
        problem.definition = with_status(problem.definition, statuses.get(problem.definition.name, set()))


def with_status(definition: Definition, statuses: set[str]) -> Definition:
    """`statuses` of its checks; what could not run here decides nothing."""
    status = VERIFIED if statuses - {"skipped"} == {"agrees"} else DRAFT
    tags = sorted({*(tag for tag in definition.tags if not tag.startswith("status:")), status})
    return definition.model_copy(update={"tags": tags})

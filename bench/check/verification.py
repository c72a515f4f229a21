"""Check the references of a Recording's Definitions, and tag each Definition by what came of it.

A Definition is `status:verified` where its reference agreed with the recorded operator on every Call that was tried,
and at least one could be; otherwise it stays `status:draft`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, cast

from kcap.bench.check.checker import CheckRequest
from kcap.bench.check.draws import DrawAnswer, TargetDraw
from kcap.bench.contents import CheckTarget, Contents
from kcap.bench.problems import Problem, distinct_samples
from kcap.replay.jobs import SEED
from kcap.replay.source import Samples, home_device, samples_by_call
from kcap.schemas.derive.derive import Derived
from kcap.schemas.derive.kernel import DerivedDefinition
from kcap.schemas.flashinfer.definition import DRAFT, VERIFIED, Definition
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.results.outcome import ReferenceCheck
from kcap.system.worker_process import Worker

TIMEOUT_S = 300.0


def check_references(contents: Contents, derived: Derived, on: CheckTarget) -> Iterator[ReferenceCheck]:
    """The checks of all Definitions of a Recording, in a process that is restarted after a crash."""
    samples = samples_by_call(contents.samples)
    with Worker(_session(contents, on), "kcap.bench.check.worker", timeout_option=None) as worker:
        for kernel in derived.kernels:
            for call in calls_to_check([use.call for use in kernel.uses]):
                sample = distinct_samples(call, samples)[0]
                answer = worker.run(_request(kernel, call, sample), TIMEOUT_S)
                yield ReferenceCheck(definition=kernel.definition.name, operator=call.operator, call=call.id, **answer)


@dataclass(frozen=True)
class WorkloadDraw:
    """The inputs of a Workload that need the bounded draw, or why the target's random inputs cannot be compared."""

    bounded: tuple[str, ...] = ()
    refused: str | None = None


Draws: TypeAlias = dict[tuple[str, str | None], WorkloadDraw]  # by Definition and Workload (None: all of it)


def check_draws(contents: Contents, derived: Derived, target: TargetDraw, on: CheckTarget) -> Draws:
    """The Workloads on which a reference gives nothing that `target` could compare, on inputs that it draws.

    Of each Definition the smallest, a middle and the largest Call are tried; the others if one of these stands out.
    """
    draws: Draws = {}
    samples = samples_by_call(contents.samples)
    with Worker(_session(contents, on), "kcap.bench.check.worker", timeout_option=None) as worker:
        for kernel in derived.kernels:
            calls = [use.call for use in kernel.uses]
            first = calls_to_check(calls)
            rest = [call for call in calls if call not in first]
            if _try_calls(worker, kernel, first, samples, target, draws):
                _try_calls(worker, kernel, rest, samples, target, draws)
    return draws


def _try_calls(
    worker: Worker,
    kernel: DerivedDefinition,
    calls: list[Call],
    samples: Samples,
    target: TargetDraw,
    draws: Draws,
) -> bool:
    """Add to `draws`; whether anything was added."""
    before = len(draws)
    for call in calls:
        for sample in distinct_samples(call, samples):
            request = {**_request(kernel, call, sample), **asdict(target)}
            answer = cast(DrawAnswer, worker.run(request, TIMEOUT_S))
            key, bounded = (kernel.definition.name, answer.get("workload")), answer.get("bounded")
            if bounded:
                draws[key] = WorkloadDraw(bounded=tuple(bounded))
            elif answer["status"] == "refused":
                draws[key] = WorkloadDraw(refused=answer["reason"])
    return len(draws) > before


def _session(contents: Contents, on: CheckTarget) -> dict[str, Any]:
    namespaces = sorted({call.namespace for call in contents.calls} - {"aten", "triton", "cpp"})
    return {
        "device": on.device,
        "home": home_device(contents.calls),
        "root": str(contents.path.resolve()),
        "namespaces": namespaces,
        "threads": None,
        "trust": on.trust,
    }


def _request(kernel: DerivedDefinition, call: Call, sample: Sample | None) -> CheckRequest:
    fields = sample.model_dump(mode="json") if sample else None
    return {"definition": kernel.definition.name, "call": call.id, "sample": fields, "seed": SEED}


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

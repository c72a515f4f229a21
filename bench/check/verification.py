"""Check the references of a Recording's Definitions, and tag each Definition by what came of it.

A Definition is `status:verified` where its reference agreed with the recorded operator on every Call that was tried,
and at least one could be; otherwise it stays `status:draft`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kcap.bench.check.checker import CheckRequest
from kcap.bench.contents import CheckTarget, Contents
from kcap.bench.problems import Problem, distinct_samples
from kcap.replay.jobs import SEED
from kcap.replay.source import home_device, samples_by_call
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

"""`flashinfer-bench`: a dataset directory of Definitions, Workloads and blobs, as FlashInfer-Bench's TraceSet loads it.

Source: FlashInfer-Bench 0.1.2, `data/trace_set.py`, `bench/utils.py`. Index inputs are written as safetensors, since it
draws random integers from -1024 to 1023. Beside its own files lie `counts.jsonl` (the exact counts of each Workload),
`calling_record.json` (ids are the Definitions' names), `checks.jsonl` (each reference against the recorded operator).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import click

from kcap.bench.check.draws import TargetDraw
from kcap.bench.check.verification import Checkers, check_references, tag_definitions
from kcap.bench.contents import Contents
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.cases import Account, Case
from kcap.bench.problems import Problem, Problems
from kcap.schemas.flashinfer import calling_record
from kcap.schemas.flashinfer.calling_record import CallingRecord, KernelCount, framework_of
from kcap.schemas.flashinfer.dataset import WorkloadCount, is_sealed, seal_dataset, write_dataset
from kcap.schemas.flashinfer.definition import VERIFIED
from kcap.schemas.recording.records import Metadata
from kcap.schemas.results import outcome
from kcap.schemas.results.export_loss import ExportLoss
from kcap.schemas.results.outcome import ReferenceCheck

DRAW = TargetDraw("FlashInfer-Bench")


@exporter("flashinfer-bench")
class FlashInferBench(Exporter):
    """A Recording's Definitions derived and checked; a dataset's as they are."""

    takes = "definitions"

    def write(self, request: ExportRequest) -> ExportLoss:
        with Checkers(request.contents, request.checked_on) as checkers:
            account = Account(request, DRAW, checkers=checkers)
            problems, checks = account.problems, list[ReferenceCheck]()
            checked = request.check and request.contents.recording is not None
            if checked and problems.derived is not None:
                checks = list(check_references(checkers, problems.derived))
        if checked:
            tag_definitions(problems.problems, checks)
            outcome.write_reference_checks(request.output / outcome.REFERENCE_CHECKS_FILE, checks)
        if problems.derived is not None:
            problems = replace(problems, problems=comparable(account))
        write_problems(request.output, problems.problems)
        if request.contents.dataset is None or is_sealed(request.contents.path):
            seal_dataset(request.output)
        write_calling_record(request.output, problems, request.contents.metadata)
        click.echo("\n".join([summary_line(problems, request.contents), *check_lines(checks)]))
        return account.loss("flashinfer-bench")

    def following(self, output: Path) -> str:
        return f"kcap validate {shlex.quote(str(output))}"


def comparable(account: Account) -> list[Problem]:
    """The Problems without the Workloads that no Solution could pass; inputs that must not be random are stored."""
    taken: dict[str, dict[str, Case]] = {}
    for case in account.taken_cases(Case.bounded_too_large, samples=True):
        taken.setdefault(case.definition.name, {})[case.workload.uuid] = account.with_stored_draws(case)
    problems = [problem for problem in account.problems.problems if problem.definition.name in taken]
    for problem in problems:
        cases = taken[problem.definition.name]
        problem.workloads = {uuid: cases[uuid].workload for uuid in problem.workloads if uuid in cases}
        problem.blobs = {uuid: cases[uuid].blob for uuid in problem.workloads if cases[uuid].blob}
        problem.counts = kept_counts(problem.counts, cases)
    return problems


def kept_counts(counts: list[WorkloadCount], workloads: Collection[str]) -> list[WorkloadCount]:
    """Those of `workloads`: where a Call loses Samples, the others stand for all of its invocations."""
    kept = [count for count in counts if count.workload in workloads]
    before, after = (Counter((count.operator, count.call) for count in each) for each in (counts, kept))
    lost = {call for call in after if after[call] < before[call]}
    return [
        count.model_copy(update={"samples": after[call]}) if (call := (count.operator, count.call)) in lost else count
        for count in kept
    ]


def write_problems(root: Path, problems: Iterable[Problem]) -> None:
    problems = list(problems)
    blobs = {uuid: blob for problem in problems for uuid, blob in problem.blobs.items()}
    workloads = {problem.definition.name: list(problem.workloads.values()) for problem in problems}
    counts = [count for problem in problems for count in problem.counts]
    write_dataset(root, [problem.definition for problem in problems], workloads, blobs, counts)


def write_calling_record(root: Path, problems: Problems, metadata: Metadata) -> None:
    """The kernel calling record of what was exported, if the framework is one that the record can name."""
    framework = framework_of(metadata)
    if framework is None or not metadata.model:
        return
    kernels = [KernelCount(id=problem.definition.name, count=problem.total) for problem in problems.problems]
    calling_record.write(
        root / "calling_record.json", CallingRecord(model=metadata.model, framework=framework, kernels=kernels)
    )


def check_lines(checks: Iterable[ReferenceCheck]) -> list[str]:
    """What the checks that do not agree say, a line for each reason, the most frequent first."""
    reasons = Counter((check.status, check.reason) for check in checks if check.status != "agrees")
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], str(item[0])))
    return [f"  {status}: {count} {'check' if count == 1 else 'checks'}: {why}" for (status, why), count in ordered]


def summary_line(problems: Problems, contents: Contents) -> str:
    """How much there is; of a Recording, how many of its kernels' invocations are in named families, and verified."""
    text = f"{len(problems.problems)} Definitions, {sum(len(p.workloads) for p in problems.problems)} Workloads"
    derived, total = problems.derived, contents.total
    if derived is None or not total:
        return text
    verified = {p.definition.name for p in problems.problems if VERIFIED in p.definition.tags}
    named, agreed = derived.invocations_in_families(contents.calls), derived.invocations_of(contents.calls, verified)
    return (
        f"{text}; of {total:,} invocations {named / total:.1%} are in named families;"
        f" {len(verified)} Definitions are verified, which stand for {agreed / total:.1%}"
    )

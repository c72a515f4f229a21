"""`flashinfer-bench`: a dataset directory of Definitions, Workloads and blobs, as FlashInfer-Bench's TraceSet loads it.

Source: FlashInfer-Bench 0.1.2, `data/trace_set.py`, `bench/utils.py`. Index inputs are written as safetensors, since it
draws random integers from -1024 to 1023. Beside its own files lie `counts.jsonl` (the exact counts of each Workload),
`calling_record.json` (ids are the Definitions' names), `checks.jsonl` (each reference against the recorded operator).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from kcap.bench.check.verification import check_references, tag_definitions
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.problems import Problem, Problems, problems_of
from kcap.schemas.flashinfer import calling_record
from kcap.schemas.flashinfer.calling_record import CallingRecord, KernelCount, framework_of
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import VERIFIED
from kcap.schemas.recording.records import Metadata
from kcap.schemas.results import outcome
from kcap.schemas.results.export_loss import ExportLoss


@exporter("flashinfer-bench")
class FlashInferBench(Exporter):
    """A Recording's Definitions derived and checked; a dataset's as they are."""

    takes = "definitions"

    def write(self, request: ExportRequest) -> ExportLoss:
        problems = problems_of(request.contents)
        if request.check and problems.derived is not None and request.contents.recording is not None:
            checks = list(check_references(request.contents, problems.derived, request.checked_on))
            tag_definitions(problems.problems, checks)
            outcome.write_reference_checks(request.output / outcome.REFERENCE_CHECKS_FILE, checks)
        write_problems(request.output, problems.problems)
        write_calling_record(request.output, problems, request.contents.metadata)
        click.echo(summary_line(problems))
        return problems.ledger.loss("flashinfer-bench", request.contents.total)

    def following(self, output: Path) -> str:
        return f"kcap validate {output}"


def write_problems(root: Path, problems: Iterable[Problem]) -> None:
    problems = list(problems)
    blobs = {uuid: blob for problem in problems for uuid, blob in problem.blobs.items()}
    workloads = {problem.definition.name: list(problem.workloads.values()) for problem in problems}
    counts = [count for problem in problems for count in problem.counts]
    write_dataset(root, [problem.definition for problem in problems], workloads, blobs, counts)


def write_calling_record(root: Path, problems: Problems, metadata: Metadata) -> None:
    """The kernel calling record of what was exported, if the framework is one that the record can name."""
    framework = framework_of(metadata)
    if framework is None or metadata.model is None:
        return
    kernels = [KernelCount(id=problem.definition.name, count=problem.total) for problem in problems.problems]
    calling_record.write(
        root / "calling_record.json", CallingRecord(model=metadata.model, framework=framework, kernels=kernels)
    )


def summary_line(problems: Problems) -> str:
    """How much there is; of a Recording, how much lies in named families, and how much is verified, by invocations."""
    text = f"{len(problems.problems)} Definitions, {sum(len(p.workloads) for p in problems.problems)} Workloads"
    if problems.derived is None:
        return text
    total = max(sum(problem.total for problem in problems.problems), 1)
    named = sum(problem.total for problem in problems.problems if problem.family) / total
    verified = [problem for problem in problems.problems if VERIFIED in problem.definition.tags]
    share = sum(problem.total for problem in verified) / total
    return f"{text}; weighed by invocations, {named:.1%} in named families, {len(verified)} verified ({share:.1%})"

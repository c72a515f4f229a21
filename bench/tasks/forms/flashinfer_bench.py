"""`flashinfer-bench`: a dataset of the one Definition, with the example as the Solution of the author `baseline`.

That is what FlashInfer-Bench's TraceSet loads, and what AgentKernelArena's builder of tasks from datasets takes, which
looks for its baseline below `solutions/baseline/`.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from kcap.bench.contents import CheckTarget
from kcap.bench.exports import ExportRequest
from kcap.bench.exports.common.cases import Account
from kcap.bench.exports.flashinfer_bench import DRAW, comparable, write_problems
from kcap.bench.problems import Problem, Problems
from kcap.bench.run.subject import RecordingSubject
from kcap.bench.tasks.draft import TaskDraft
from kcap.bench.tasks.forms import MARK, TaskForm, task_form
from kcap.bench.tasks.instruction import FormText, instruction
from kcap.errors import KcapError
from kcap.schemas.flashinfer import solution as solutions_file
from kcap.schemas.flashinfer.dataset import seal_dataset, with_folder
from kcap.schemas.flashinfer.solution import BuildSpec, Solution, SourceFile
from kcap.schemas.results.export_loss import LossLedger

AUTHOR = "baseline"
TEXT = FormText(
    solution="a Solution in FlashInfer-Bench's form, or a `.py` file",
    start="`solutions/baseline/` has one that passes: the reference, which the Definition has as `reference`.",
    commands=("kcap bench . --solutions DIR -o judged", "flashinfer-bench run --local ."),
    remarks="Either writes a Trace for each Workload; `kcap bench` weighs them by how often the engine ran them.",
)


@task_form("flashinfer-bench")
class FlashInferBench(TaskForm):
    def write(self, draft: TaskDraft, folder: Path) -> None:
        problem = passable(draft)
        write_problems(folder, [problem])
        if draft.sealed:
            seal_dataset(folder)
        definition = draft.definition
        solution = example(draft)
        path = folder / "solutions" / AUTHOR / definition.op_type / definition.name / f"{solution.name}.json"
        solutions_file.write(with_folder(path), solution)
        (folder / "instruction.md").write_text(instruction(draft, TEXT), encoding="utf-8")
        (folder / MARK).write_text(f"{definition.name}\n", encoding="utf-8")

    def following(self, output: Path) -> str:
        return f"kcap validate {shlex.quote(str(output))}"


def passable(draft: TaskDraft) -> Problem:
    """The Problem with what FlashInfer-Bench draws at random and must not stored; KcapError where nothing is left."""
    subject = draft.subject
    if not isinstance(subject, RecordingSubject) or subject.problems.derived is None:
        return draft.problem
    derived = subject.problems.derived
    kernels = [kernel for kernel in derived.definitions if kernel.definition.name == draft.definition.name]
    problems = Problems([replace(draft.problem)], LossLedger(), replace(derived, kernels=kernels))
    on = CheckTarget(draft.request.device, draft.request.trust)
    request = ExportRequest(subject.contents, draft.request.output, checked_on=on)
    left = comparable(Account(request, DRAW, problems))
    if not left:
        raise KcapError(f"{draft.definition.name}: no input that FlashInfer-Bench draws suits it: use another --form")
    return left[0]


def example(draft: TaskDraft) -> Solution:
    return Solution(
        name=f"{draft.definition.name}_example",
        definition=draft.definition.name,
        author=AUTHOR,
        description="The reference, as a start.",
        spec=BuildSpec(
            language="python",
            target_hardware=[draft.task.device or "any"],
            entry_point="solution.py::run",
            destination_passing_style=False,
        ),
        sources=[SourceFile(path="solution.py", content=draft.example)],
    )

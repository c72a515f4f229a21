"""`kcap`: the task's own form, which `kcap judge` reads. Its files are described in `kcap.bench.tasks.folder`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from kcap.bench.tasks.draft import TaskDraft
from kcap.bench.tasks.folder import DATASET, EXAMPLE, MEASUREMENTS, SOLUTION_FOLDER
from kcap.bench.tasks.forms import TaskForm, task_form
from kcap.bench.tasks.instruction import instruction
from kcap.schemas.files.jsonfile import dump_json
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.dataset import with_folder
from kcap.schemas.results.measurement import write_measurements
from kcap.schemas.results.task import TASK_FILE

SKILL = Path(__file__).parent.parent / "skill.md"


@task_form("kcap")
class Kcap(TaskForm):
    def write(self, draft: TaskDraft, folder: Path) -> None:
        write_task(draft, folder)
        (folder / "instruction.md").write_text(instruction(draft), encoding="utf-8")

    def following(self, output: Path) -> str:
        return f"kcap judge {shlex.quote(str(output))} --quick"


def write_task(draft: TaskDraft, folder: Path) -> None:
    """All but the instruction."""
    definition = draft.definition
    draft.write_dataset(folder / DATASET)
    definitions_file.write(folder / "definition.json", definition)
    (folder / "reference.py").write_text(definition.reference.strip() + "\n", encoding="utf-8")
    (folder / EXAMPLE).write_text(draft.example, encoding="utf-8")
    with_folder(folder / SOLUTION_FOLDER / "solution.py").write_text(draft.example, encoding="utf-8")
    for path, source in draft.sources.items():
        with_folder(folder / path).write_text(source, encoding="utf-8")
    with (folder / "workloads.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(workload.model_dump_json() + "\n" for workload in draft.task.workloads)
    if draft.measurements:
        write_measurements(folder / MEASUREMENTS, draft.measurements)
    shutil.copyfile(SKILL, folder / "SKILL.md")
    (folder / TASK_FILE).write_bytes(dump_json(draft.task.model_dump(mode="json")))

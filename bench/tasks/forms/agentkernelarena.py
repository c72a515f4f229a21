"""`agentkernelarena`: a task of AgentKernelArena's, in version 2 of its configuration.

    config.yaml          what may be edited, and the command that evaluates it
    README.md            the instruction
    source/solution.py   the candidate: at first the example
    scripts/evaluate.py  the runner: speaks `arena-eval-v1`, and asks `kcap judge`
    scripts/task/        the task

The arena keeps a copy of the first candidate as the baseline. Source: `docs/how-to/add-task.md`, `src/task_spec.py` and
`src/task_protocol.py` of AMD-AGI/AgentKernelArena.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from kcap.bench.tasks.draft import TaskDraft
from kcap.bench.tasks.forms import TaskForm, task_form
from kcap.bench.tasks.forms.common import arena_evaluate
from kcap.bench.tasks.forms.kcap import write_task
from kcap.bench.tasks.instruction import FormText, instruction
from kcap.schemas.flashinfer.dataset import with_folder

SOLUTION = "source/solution.py"
TEXT = FormText(
    solution=f"`{SOLUTION}`",
    start="At first it is the reference, which passes. Its first line, `# definition: NAME`, has to stay; nothing in "
    "`scripts/` may be changed.",
    commands=(
        f"kcap judge {SOLUTION} --task scripts/task --trust --quick    # the most counted Workload, in seconds",
        f"kcap judge {SOLUTION} --task scripts/task --trust            # all of them",
        "python3 scripts/evaluate.py candidate correctness",
    ),
    remarks="The exit code is 0 where the Solution is right, and 1 where it is not.",
)
CONFIG = """\
schema_version: 2
description: {description}
instructions: [README.md]
kernel_identity:
  logical_operator: {operator}
candidate:
  language: triton
  initial_state: implemented
  initial_language: python
  editable: [{solution}]
  entrypoints:
    - {{file: {solution}, kind: function, symbol: run}}
baseline:
  kind: initial_candidate
evaluation:
  runner: [python3, scripts/evaluate.py]
  workloads: scripts/task/workloads.jsonl
  timeout_s: 3600
"""


@task_form("agentkernelarena")
class AgentKernelArena(TaskForm):
    needs = "in a clone of AgentKernelArena, with this folder below tasks/"

    def write(self, draft: TaskDraft, folder: Path) -> None:
        name = draft.definition.name
        description = f"Write a faster {name}: it computes what the reference does." + (
            f" The engine ran it {draft.task.invocations} times." if draft.task.kernels else ""
        )
        quoted = json.dumps(description), json.dumps(name)
        config = CONFIG.format(description=quoted[0], operator=quoted[1], solution=SOLUTION)
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        (folder / "README.md").write_text(instruction(draft, TEXT), encoding="utf-8")
        with_folder(folder / SOLUTION).write_text(draft.example, encoding="utf-8")
        write_task(draft, folder / "scripts" / "task")
        shutil.rmtree(folder / "scripts" / "task" / "solution")
        shutil.copyfile(arena_evaluate.__file__, folder / "scripts" / "evaluate.py")

    def following(self, output: Path) -> str:
        return f"cd {shlex.quote(str(output))} && python3 scripts/evaluate.py validate-task"

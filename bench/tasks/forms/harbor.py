"""`harbor`: a task of Harbor's, which Terminal-Bench, verifiers and NeMo Gym run too.

    task.toml, instruction.md
    environment/Dockerfile    what the agent works in; environment/task is the task, at /app/task there
    tests/test.sh             judges /app/task/solution by the task in tests/, which the agent never has
    tests/held_out/           the Workloads that were kept back
    solution/solve.sh         the example

Harbor copies tests/ to /tests when the agent has ended. Its reward file is a flat map of numbers: `reward` is how many
times as fast as the baseline the Solution is, weighted by the engine's counts, and 0 unless it passes everywhere.
Source: the format's documentation (schema 1.1; Harbor 0.26.0 loads such folders) and NeMo Gym's page on verifiers in
task folders.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from kcap.bench.tasks.draft import TaskDraft
from kcap.bench.tasks.forms import TaskForm, task_form
from kcap.bench.tasks.forms.kcap import write_task
from kcap.bench.tasks.instruction import FormText, instruction
from kcap.schemas.flashinfer.dataset import with_folder
from kcap.version import __version__

HERE = "/app/task"
TEXT = FormText(
    solution=f"`{HERE}/solution/solution.py`",
    start=f"All files are in `{HERE}`. At first it is the reference, which passes; `example.py` is a copy of it. Its "
    "first line, `# definition: NAME`, has to stay.",
    commands=(
        f"kcap judge {HERE} --trust --quick    # the most counted Workload, in seconds",
        f"kcap judge {HERE} --trust            # all of them",
        f"kcap judge {HERE} --trust --json     # for programs: kcap judge --schema prints what it holds",
    ),
    remarks="The exit code is 0 where the Solution is right, and 1 where it is not. The reward is how many times as\n"
    "fast as the baseline it is, weighted by how often each Workload ran, and 0 unless it passes on all of them.",
)
TEST = """\
#!/bin/bash
# Judges what the agent left, by the task in /tests, which it never had.
mkdir -p /logs/verifier
echo '{"reward": 0}' > /logs/verifier/reward.json
kcap judge {here}/solution --task /tests/task {held_out}--trust --json --fail-on never \\
    --reward /logs/verifier/reward.json > /logs/verifier/verdict.json
cat /logs/verifier/reward.json
"""
DOCKERFILE = """\
# KCAP: what pip installs; a checkout or a wheel that lies beside this file will do, once it is copied in.
ARG BASE=python:3.12
FROM $BASE
ARG KCAP=kcap=={version}
RUN apt-get update && apt-get install -y --no-install-recommends g++ tmux && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "$KCAP" "torch>=2.11"
COPY task {here}
WORKDIR {here}
"""
SOLVE = """\
#!/bin/bash
# The example: it passes, and is as fast as the reference.
cp {here}/example.py {here}/solution/solution.py
"""


@task_form("harbor")
class Harbor(TaskForm):
    needs = "with Harbor"

    def write(self, draft: TaskDraft, folder: Path) -> None:
        (folder / "task.toml").write_text(settings(draft), encoding="utf-8")
        (folder / "instruction.md").write_text(instruction(draft, TEXT), encoding="utf-8")
        write_task(draft, folder / "environment" / "task")
        write_task(draft, folder / "tests" / "task")
        held_out = ""
        if draft.held_out is not None:
            (folder / "tests" / "held_out").mkdir()
            draft.write_held_out(folder / "tests" / "held_out")
            held_out = "--held-out /tests/held_out "
        dockerfile = DOCKERFILE.format(version=__version__, here=HERE)
        (folder / "environment" / "Dockerfile").write_text(dockerfile, encoding="utf-8")
        test = TEST.replace("{here}", HERE).replace("{held_out}", held_out)
        for path, text in (("tests/test.sh", test), ("solution/solve.sh", SOLVE.format(here=HERE))):
            script = with_folder(folder / path)
            script.write_text(text, encoding="utf-8")
            script.chmod(0o755)

    def following(self, output: Path) -> str:
        return f"harbor run -p {shlex.quote(str(output))} -a oracle"


def settings(draft: TaskDraft) -> str:
    """task.toml."""
    task = draft.task
    name = re.sub(r"[^a-z0-9-]+", "-", task.definition.lower()).strip("-")
    gpus = 0 if task.device == "cpu" else 1
    about = f"Write a faster {task.definition}" + (f", as run for {task.model}" if task.model else "")
    return "\n".join(
        [
            'schema_version = "1.1"',
            "",
            "[task]",
            f'name = "kcap/{name}"',
            f"description = {json.dumps(about, ensure_ascii=False)}",
            f'keywords = ["kernel", "performance", {json.dumps(task.op_type)}]',
            "",
            "[metadata]",
            'category = "gpu-kernels"',
            "",
            "[verifier]",
            "timeout_sec = 1800.0",
            "",
            "[agent]",
            "timeout_sec = 7200.0",
            "",
            "[environment]",
            "build_timeout_sec = 3600.0",
            "cpus = 4",
            "memory_mb = 32768",
            "storage_mb = 40960",
            f"gpus = {gpus}",
            "",
        ]
    )

"""instruction.md: what to write, why it is worth it, what has to hold, and how it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kcap.bench.accuracy import describe_tolerances
from kcap.bench.tasks.draft import TaskDraft, mean_us
from kcap.replay.calls.report import duration
from kcap.schemas.flashinfer.definition import Definition, DefinitionTensor
from kcap.schemas.recording.phases import ALL_PHASES
from kcap.schemas.results.task import Task, TaskWorkload

MOST_ROWS = 40
RULES = """\
- `run` takes the inputs in the order above and returns the outputs, several of them as a tuple. It may instead take the
  outputs after the inputs, allocated, and fill them.
- Compute every output from this call's inputs. Nothing may be remembered from one call to the next: inputs are drawn
  anew for every call, the timed ones too.
- Leave the inputs as they are, and finish the work before `run` returns, or on the current CUDA stream.
- Make `run` fit for a CUDA graph where there is a GPU: no waiting for the GPU, no copy to the host.
- The Solution runs confined, without a network, and may write only to its scratch folder. It need not be one file: a
  JSON file in FlashInfer-Bench's form holds several sources, in Python, Triton, C++ or CUDA.
- What earns a score that it does not deserve is reported as `REWARD_HACK`, meant or not."""


@dataclass(frozen=True)
class FormText:
    """Where a form has the Solution, what lies there at first, and the commands that judge it."""

    solution: str = "`solution/solution.py`"
    start: str = (
        "At first it is the reference, which passes; `example.py` is a copy of it. Its first line, "
        "`# definition: NAME`, has to stay."
    )
    commands: tuple[str, ...] = (
        "kcap judge . --quick    # the most counted Workload, in seconds",
        "kcap judge .            # all of them",
        "kcap judge . --json     # for programs: kcap judge --schema prints what it holds",
    )
    remarks: str = (
        "The exit code is 0 where the Solution is right, and 1 where it is not. `kcap judge . --serve` stays warm and\n"
        "takes a request a line."
    )


OWN = FormText()


def instruction(draft: TaskDraft, form_text: FormText = OWN) -> str:
    """The page."""
    task, definition = draft.task, draft.definition
    parts = [
        f"# Write a faster {definition.name}",
        _what(task, definition, form_text),
        f"## Why\n{_why(task)}",
        f"## Interface\n{_interface(definition)}",
        f"## What has to hold\n{tolerance(definition)}\n\n{RULES}",
        f"## What the engine runs\n{_engine(task)}",
        f"## Workloads\n{workload_table(task.workloads)}",
        f"## How to judge\n{_how(task, form_text)}",
    ]
    if task.notes:
        parts.append("## Know this\n" + "\n".join(f"- {note}" for note in task.notes))
    return "\n\n".join(parts) + "\n"


def _what(task: Task, definition: Definition, form_text: FormText) -> str:
    source = " ".join(word for word in (task.framework, task.framework_version) if word)
    served = f", as {source} ran it for {task.model}" if source and task.model else ""
    described = f" {definition.description.strip()}" if definition.description else ""
    return (
        f"Write {form_text.solution}: a function `run` that computes what the reference does, "
        f"faster{served}.{described}\n\n{form_text.start}"
    )


def _why(task: Task) -> str:
    counted = any(kernel.invocations for kernel in task.kernels)
    lines = [f"The engine ran this {task.invocations:,} times in what was recorded{_phases(task)}."] if counted else []
    for phase, room in task.room.items():
        if phase == ALL_PHASES and len(task.room) == 2:
            continue
        name = "over all phases, weighted as they were served" if phase == ALL_PHASES else f"in {phase}"
        share = f", {room.share:.1%} of {duration(room.total_us)}" if room.share is not None and room.total_us else ""
        gain = duration(room.engine_us - room.floor_us)
        lines.append(
            f"- {name}: {duration(room.engine_us)} now, {duration(room.floor_us)} at the machine's floor; "
            f"at most {gain} can be gained{share}"
        )
    if not task.room:
        lines.append("How long it took there is not known: gains are counted against the reference.")
    return "\n".join(lines)


def _phases(task: Task) -> str:
    sums: dict[str, int] = {}
    for workload in task.workloads:
        for phase, count in workload.counts.items():
            sums[phase] = sums.get(phase, 0) + count
    named = [f"{count:,} in {phase}" for phase, count in sums.items() if phase != "other"]
    return f" ({', '.join(named)})" if named else ""


def _interface(definition: Definition) -> str:
    rows = ["| | name | dtype | shape | |", "|---|---|---|---|---|"]
    for kind, tensors in (("input", definition.inputs), ("output", definition.outputs)):
        rows += [_tensor_row(kind, name, tensor) for name, tensor in tensors.items()]
    axes = [f"`{name}` = {size}" for name, size in definition.const_axes.items()]
    axes += [f"`{name}` varies" for name in definition.var_axes]
    lines = ["\n".join(rows), "", f"Axes: {', '.join(axes)}."]
    if definition.constraints:
        lines += ["", "These hold for the inputs:", *(f"- `{constraint}`" for constraint in definition.constraints)]
    return "\n".join(lines)


def _tensor_row(kind: str, name: str, tensor: DefinitionTensor) -> str:
    shape = "a Python scalar" if tensor.shape is None else f"[{', '.join(tensor.shape)}]"
    remarks = [tensor.description or "", "may be None" if tensor.optional else ""]
    return f"| {kind} | `{name}` | {tensor.dtype} | {shape} | {'; '.join(filter(None, remarks))} |"


def tolerance(definition: Definition) -> str:
    dtypes = [getattr(torch, output.dtype, None) for output in definition.outputs.values()]
    comparable = [dtype for dtype in dtypes if isinstance(dtype, torch.dtype)]
    return (
        f"An output may differ from the reference, computed in higher precision, by: {describe_tolerances(comparable)}."
    )


def _engine(task: Task) -> str:
    rows = []
    for kernel in task.kernels:
        compiled = "a compiled operator" if kernel.language == "operator" else f"{kernel.language}, without its source"
        source = (
            f"its source is in `{kernel.source}`, how it was launched in `task.json`" if kernel.source else compiled
        )
        rows.append(f"- `{kernel.operator}`, {kernel.invocations:,} times: {source}")
    return "\n".join(rows) or "It is not known."


def workload_table(workloads: Sequence[TaskWorkload]) -> str:
    """The most counted first. Times are microseconds."""
    rows = [
        "| workload | sizes | times run | share | engine µs | floor µs | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for workload in workloads[:MOST_ROWS]:
        sizes = ", ".join(f"{name} {size}" for name, size in workload.axes.items())
        engine = mean_us(workload.engine_us, workload.counts)
        rows.append(
            f"| {short_id(workload.workload)} | {sizes or '–'} | {sum(workload.counts.values()):,} "
            f"| {workload.share:.1%} | {_us(engine)} | {_us(workload.floor_us)} | {workload.bound or '–'} |"
        )
    if len(workloads) > MOST_ROWS:
        rows.append(f"\n{len(workloads) - MOST_ROWS} more are in `workloads.jsonl`.")
    return "\n".join(rows)


def short_id(uuid: str) -> str:
    """The first eight digits of a uuid; any other name as it is."""
    return uuid[:8] if len(uuid) == len("00000000-0000-0000-0000-000000000000") else uuid


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.2f}"


def _how(task: Task, form_text: FormText) -> str:
    lines = ["```", *form_text.commands, "```", "", form_text.remarks]
    if task.held_out is not None:
        lines.append(f"{task.held_out.workloads} more Workloads are kept back and judged last: be right for any sizes.")
    return "\n".join(lines)

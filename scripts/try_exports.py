"""Export a Recording to every benchmark, and load and run each export with that benchmark's own code.

    python scripts/try_exports.py RECORDING [--backendbench DIR] [--tritonbench DIR] [--kernelbench DIR]
        [--sol-execbench DIR] [--flashinfer-bench DIR] [--agentkernelarena DIR] [-o FOLDER]

Each DIR is a clone of the benchmark's repository. FlashInfer-Bench may be installed instead; the others are skipped
without one. What their code imports has to be installed. References stand in for Solutions: each is held against
itself, as the benchmark compares. AgentKernelArena gets a task of the most counted Definition, and asks for all that it
asks of one; without a GPU it must be told that there is no time. The exports stay in FOLDER. Ends with 1 if something
did not load or pass.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCES = {"kernelbench": "src", "sol-execbench": "src"}  # where in a clone its package lies


@dataclass
class Tried:
    """What came of one export: inputs or problems that loaded, those that passed of those that ran, and what failed."""

    loaded: int = 0
    ran: int = 0
    passed: int = 0
    failed: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """One that is run: passed if nothing is raised."""
        self.ran += 1
        try:
            yield
            self.passed += 1
        except Exception as error:  # whatever a benchmark raises is this one's result
            self.failed.append(
                f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
            )


def flashinfer_bench(export: Path, clone: Path | None) -> Tried:
    from flashinfer_bench.bench.utils import compute_error_stats, gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import TraceSet

    read, tried = TraceSet.from_path(str(export)), Tried()
    tolerances = SimpleNamespace(rtol=1e-2, atol=1e-2, required_matched_ratio=None)  # its defaults
    for name, definition in read.definitions.items():
        for trace in read.workloads.get(name, []):
            tried.loaded += 1
            with tried.running(f"{name} {trace.workload.uuid}"):
                stored = load_safetensors(definition, trace.workload, export)
                inputs = gen_inputs(definition, trace.workload, DEVICE, stored)
                run = BuilderRegistry.get_instance().build_reference(definition)
                for expected, actual in outputs_of(run, inputs):
                    check_finite(actual)
                    if compute_error_stats(actual, expected, tolerances)[2]:
                        raise ValueError("its own outputs differ")
    return tried


def sol_execbench(export: Path, clone: Path | None) -> Tried:
    from sol_execbench.core import Definition, Workload
    from sol_execbench.core.bench.correctness import compute_error_stats
    from sol_execbench.core.bench.io import gen_inputs, load_safetensors

    tried, scripts = Tried(), importlib.util.spec_from_file_location("run_dataset", f"{clone}/scripts/run_dataset.py")
    assert scripts is not None and scripts.loader is not None
    run_dataset = importlib.util.module_from_spec(scripts)
    scripts.loader.exec_module(run_dataset)
    for problem in run_dataset.discover_problems(export):
        definition = Definition.model_validate_json((problem / "definition.json").read_bytes())
        scope: dict[str, Any] = {}
        exec(definition.reference, scope)
        for line in (problem / "workload.jsonl").read_bytes().splitlines():
            workload = Workload.model_validate_json(line)
            tried.loaded += 1
            with tried.running(f"{definition.name} {workload.uuid}"):
                inputs = gen_inputs(definition, workload, DEVICE, load_safetensors(definition, workload, [export]))
                for expected, actual in outputs_of(scope["run"], inputs):
                    correctness, exceeds = compute_error_stats(actual, expected, workload.tolerance)
                    if exceeds:
                        raise ValueError(f"its own outputs differ ({correctness})")
    return tried


def outputs_of(run: Callable[..., Any], inputs: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The outputs of two runs on equal inputs, in pairs."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.inference_mode():
        pair = [run(*inputs), run(*copies)]
    first, second = (list(one) if isinstance(one, tuple | list) else [one] for one in pair)
    return [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True)]


def check_finite(output: torch.Tensor) -> None:
    if output.is_floating_point() and not torch.isfinite(output.float()).all():
        raise ValueError("an output is nan or inf")


def kernelbench(export: Path, clone: Path | None) -> Tried:
    from kernelbench.eval import load_original_model_and_inputs, run_and_check_correctness

    if DEVICE == "cpu":
        torch.cuda.synchronize = lambda *_, **__: None  # its comparison waits for a GPU
    tried = Tried()
    for path in sorted(export.glob("level*/*.py")):
        loaded = load_original_model_and_inputs(path.read_text(), {})
        if loaded is None or None in loaded:
            tried.failed.append(f"{path.name}: does not load")
            continue
        tried.loaded += 1
        model, get_init_inputs, get_inputs = loaded
        with tried.running(path.name):
            pair = [model(*get_init_inputs()) for _ in range(2)]
            result = run_and_check_correctness(*pair, get_inputs, {}, 3, device=torch.device(DEVICE), backend="triton")
            if not result.correctness:
                raise ValueError(str(result.metadata)[:150])
            if not get_inputs():
                raise ValueError("get_inputs is empty: its result is a constant")
    return tried


def tritonbench(export: Path, clone: Path | None) -> Tried:
    config = Path(f"{clone}/tritonbench/operator_loader/aten/config.yaml")
    loader = config.with_name("input_loader.py")
    if not loader.is_file():
        raise RuntimeError("this clone reads text files: kcap writes the JSON that its later versions read")
    spec = importlib.util.spec_from_file_location("input_loader", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = {line.split(":")[0] for line in config.read_text().splitlines()}
    tried = Tried()
    for path in sorted(export.glob("aten.*.json")):
        if path.stem not in listed:
            tried.failed.append(f"{path.stem}: run.py --op does not list it")
            continue
        inputs = module.OperatorInputLoader(path.stem, json.loads(path.read_bytes())).get_input_iter()()
        _, base, overload = path.stem.split(".")
        operator = getattr(getattr(torch.ops.aten, base), overload)
        for number, (args, kwargs) in enumerate(inputs):
            tried.loaded += 1
            with tried.running(f"{path.stem} input {number}"):
                operator(*args, **kwargs)
    return tried


def backendbench(export: Path, clone: Path | None) -> Tried:
    out = export.with_name(f"{export.name}.log")
    options = ["--suite", "torchbench", "--backend", "aten", "--log-dir", str(out)]
    source = ["--alternative-torchbench-data-path", str(export / "trace.parquet")]
    command = [sys.executable, "-m", "BackendBench.scripts.main", *options, *source]
    done = subprocess.run(command, capture_output=True, text=True, cwd=export)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    results = json.loads((out / "full_results.json").read_text())
    correct = [result for result in results if "is_correct" in result or "correctness_score" in result]
    tried = Tried(len(correct), len(correct))
    for result in correct:
        if result.get("is_correct", result.get("correctness_score")):
            tried.passed += 1
        else:
            tried.failed.append(f"{result['op_name']}: {result.get('error_msg', '')[:150]}")
    return tried


def agentkernelarena(task: Path, clone: Path | None) -> Tried:
    from src.task_execution import run_action
    from src.task_protocol import CaseManifest
    from src.task_spec import ACTIONS, load_task_spec

    spec, manifest, tried = load_task_spec(task / "config.yaml", task_id=f"kcap/{task.name}"), None, Tried(1)
    for role, action in ACTIONS:
        with tried.running(f"{role} {action}"):
            done = run_action(spec, task, role=role, action=action, phase="task_validation", manifest=manifest).result
            manifest = manifest or CaseManifest.from_result(done)
            timeless = DEVICE == "cpu" and action == "performance" and done.failure_kind == "no_device_time"
            if not done.passed and not timeless:
                raise ValueError(done.reason)
    return tried


def write_arena_task(recording: Path, task: Path) -> list[str]:
    """The command that writes one."""
    command = [sys.executable, "-m", "kcap", "task", str(recording)]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    name = listed[1].split()[-1] if len(listed) > 1 else ""
    return [*command, "--definition", name, "--form", "agentkernelarena", "--no-check", "-o", str(task)]


TARGETS: dict[str, Callable[[Path, Path | None], Tried]] = {
    "agentkernelarena": agentkernelarena,
    "backendbench": backendbench,
    "flashinfer-bench": flashinfer_bench,
    "kernelbench": kernelbench,
    "sol-execbench": sol_execbench,
    "tritonbench": tritonbench,
}


def export_and_try(target: str, recording: Path, clone: Path | None, folder: Path) -> tuple[Tried | None, str]:
    """What came of it in a process of its own, or None and why it was skipped."""
    export = folder / target
    if target == "agentkernelarena":
        command = write_arena_task(recording, export)
    else:
        command = [sys.executable, "-m", "kcap", "export", str(recording), "--to", target, "-o", str(export)]
        command += ["--allow-truncated", "--force"]
    exported = subprocess.run(command, capture_output=True, text=True)
    if exported.returncode:
        return None, exported.stderr.strip().splitlines()[-1]
    package = [str(clone / SOURCES.get(target, ""))] if clone else []
    path = os.pathsep.join([*package, *filter(None, [os.environ.get("PYTHONPATH")])])
    again = [sys.executable, __file__, str(export), "--only", target, *([f"--{target}", str(clone)] if clone else [])]
    done = subprocess.run(again, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["ended without a word"])[-1][:150]
    return Tried(**json.loads(done.stdout.splitlines()[-1])), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where the exports stay; default: a temporary folder")
    parser.add_argument("--only", choices=TARGETS, help=argparse.SUPPRESS)  # try an export that is there, print JSON
    for target in TARGETS:
        parser.add_argument(f"--{target}", type=Path, metavar="DIR")
    args = parser.parse_args()
    clones = {target: getattr(args, target.replace("-", "_")) for target in TARGETS}
    if args.only:
        print(json.dumps(asdict(TARGETS[args.only](args.recording.resolve(), clones[args.only]))))
        return
    folder, rows, sound = args.output or Path(tempfile.mkdtemp()), [], True
    folder.mkdir(parents=True, exist_ok=True)
    for target, clone in clones.items():
        if clone is None and not (target == "flashinfer-bench" and importlib.util.find_spec("flashinfer_bench")):
            rows.append((target, "skipped", f"pass --{target} DIR", ""))
            continue
        start = time.monotonic()
        tried, reason = export_and_try(target, args.recording, clone and clone.resolve(), folder.resolve())
        seconds = f"{time.monotonic() - start:.0f}"
        if tried is None:
            rows.append((target, "skipped", reason, seconds))
            continue
        print(*tried.failed, sep="\n", end="\n" if tried.failed else "")
        sound = sound and not tried.failed and tried.loaded > 0
        rows.append((target, f"{tried.loaded:,}", f"{tried.passed:,} of {tried.ran:,}", seconds))
    for row in [("target", "loaded", "passed of run", "seconds"), *rows]:
        print(f"{row[0]:<18}{row[1]:<10}{row[2]:<24}{row[3]}")
    sys.exit(not sound)


if __name__ == "__main__":
    main()

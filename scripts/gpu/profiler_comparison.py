"""One decode step as the engine's own profiler sees it and as kcap does: what each costs, and what each can tell of it.

    python scripts/gpu/profiler_comparison.py [--model meta-llama/Llama-3.1-8B] [--num-layers 4] [--compiled]
        [--batch 16] [--tokens 64] [--pairs 3]

One vLLM with kcap in it serves the same batch unobserved, under its torch profiler (with shapes, without stacks),
recorded, and unobserved once more, in turns. A step's time is the median of the turns, with the least and the most; the
two unobserved columns differ by chance alone. Where vLLM can profile its graphs' captures (`capture_torch_profiler`,
since 0.26) it does, and what the captures tell is counted, too. "with shapes" of the profiler's kernels: an operator
whose shapes are in the trace launched it, so that a replayed graph's have none. Ends with a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from overhead import Bench

from kcap.capture.engines.vllm import adapter
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.schemas.recording.recording import Recording

Event = dict[str, Any]
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def profiler_options(folder: Path) -> dict[str, Any]:
    """vLLM's, as far as this version has them."""
    from vllm.config import ProfilerConfig

    wanted = {
        "profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_record_shapes": True,
        "torch_profiler_with_stack": False, "ignore_frontend": True, "capture_torch_profiler": True,
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(ProfilerConfig)}
    return {name: value for name, value in wanted.items() if name in known}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def traces(folder: Path) -> Iterator[list[Event]]:
    """The events of each trace directly in `folder`, the newest first."""
    for file in sorted(folder.glob("*.json*"), key=lambda file: file.stat().st_mtime, reverse=True):
        content = file.read_bytes()
        found = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
        yield found["traceEvents"]


def decode_step(events: list[Event]) -> tuple[float, float]:
    """When a decode step of the whole batch began and the next step did, in µs, by vLLM's annotations."""
    steps = [event for event in events if event.get("cat") == "user_annotation" and "generation" in event["name"]]
    steps.sort(key=lambda event: float(event["ts"]))
    ((usual, _),) = Counter(step["name"] for step in steps).most_common(1)
    last = max(number for number, step in enumerate(steps[:-1]) if step["name"] == usual)
    return float(steps[last]["ts"]), float(steps[last + 1]["ts"])


def outermost(operators: list[Event]) -> list[Event]:
    """Those that no other of their thread called."""
    kept, ends = [], dict[Any, float]()
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(event["tid"], -1.0):
            kept.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return kept


def told_by_profiler(folder: Path) -> dict[str, str]:
    """Of the step, from its trace."""
    events = next(traces(folder))
    begin, end = decode_step(events)
    inside = [event for event in events if event.get("ph") == "X" and begin <= event["ts"] < end]
    operators = [event for event in inside if event.get("cat") == "cpu_op"]
    shaped = {e["args"].get("External id") for e in events if any(e.get("args", {}).get("Input Dims", []))}
    runtime = {e["args"].get("correlation") for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    kernels = [e for e in events if e.get("cat") in KERNELS and e["args"].get("correlation") in runtime]
    calls = outermost(operators)
    found = {
        "operator calls, outermost": f"{len(calls)} ({len(operators)} with those that they call)",
        "... with shapes": str(sum(any(event["args"].get("Input Dims", [])) for event in calls)),
        "... with strides": str(sum(any(event["args"].get("Input Strides", [])) for event in calls)),
        "... with the values of indices": "0",
        "kernels on the GPU": str(len(kernels)),
        "... of them with shapes": str(sum(e["args"].get("External id") in shaped for e in kernels)),
    }
    captures = folder / "capture_traces"
    if captures.exists():
        ops = [event for trace in traces(captures) for event in trace if event.get("cat") == "cpu_op"]
        found["in traces of captures"] = f"{len(ops)} operators, {size_of(captures) / 1e6:.1f} MB"
    return found


def told_by_kcap(recording: Recording) -> dict[str, str]:
    """Of the last listed decode step, with the graphs that it replayed."""
    step = [step for step in recording.steps if step.phase == "decode" and step.program is not None][-1]
    assert step.program is not None
    program = recording.program(step.program)
    calls = [call for call in recording.ran(program) if call.kind == "kernel"]
    in_graphs = sum(len(recording.program(graph).calls) for _, graph in program.graphs)
    sampled = {sample.call for sample in recording.samples}
    with_tensors = str(sum(any(True for _ in call.tensors()) for call in calls))
    return {
        "operator calls, outermost": f"{len(calls)} ({in_graphs} in graphs)",
        "... with shapes": with_tensors,
        "... with strides": with_tensors,
        "... with the values of indices": str(sum(call.id in sampled for call in calls)),
    }


def spread(milliseconds: list[float]) -> str:
    return f"{median(milliseconds):.2f} ms ({min(milliseconds):.2f} to {max(milliseconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--compiled", action="store_true", help="the engine's defaults instead of eager")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence, one a decode step")
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="profiler-comparison-"))
    session = Session(str(folder / "shards"), framework="vLLM", model=given.model)
    session.write()
    os.environ |= {**adapter.FRAMEWORK.environment, SESSION_VARIABLE: str(session.file)}
    options = profiler_options(folder / "traces")
    given.engine_arg = [f"profiler_config={json.dumps(options)}"]
    bench = Bench(given, session)
    bench.recording(False)
    bench.run(given.batch, given.tokens)
    seconds: dict[str, list[float]] = {"neither": [], "profiler": [], "kcap": [], "again": [], "written": []}
    for _ in range(given.pairs):
        seconds["neither"].append(bench.run(given.batch, given.tokens))
        bench.llm.start_profile()
        seconds["profiler"].append(bench.run(given.batch, given.tokens))
        began = time.monotonic()
        bench.llm.stop_profile()
        seconds["written"].append(time.monotonic() - began)
        bench.recording(True)
        seconds["kcap"].append(bench.run(given.batch, given.tokens))
        bench.recording(False)
        seconds["again"].append(bench.run(given.batch, given.tokens))
    began = time.monotonic()
    recording = fold_session(session, folder / "out")
    folded = time.monotonic() - began
    per_step = {name: spread([1000 * run / given.tokens for run in runs]) for name, runs in seconds.items()}
    trace = max((file.stat().st_size for file in (folder / "traces").glob("*.json*")), default=0)
    profiler, own = told_by_profiler(folder / "traces"), told_by_kcap(recording)
    steps = sum(recording.metadata.steps.values())
    rows = [
        ("a step, unobserved", per_step["neither"], per_step["again"]),
        ("a step, observed", per_step["profiler"], per_step["kcap"]),
        ("writing it out", f"{median(seconds['written']):.1f} s", f"{folded:.1f} s"),
        ("on disk", f"{trace / 1e6:.2f} MB of {given.tokens} steps",
         f"{size_of(recording.path) / 1e6:.2f} MB of {steps} steps"),
        *((name, profiler.get(name, ""), own.get(name, "")) for name in [*profiler, *(own.keys() - profiler.keys())]),
    ]  # fmt: skip
    print(f"\nvLLM {recording.metadata.framework_version}, {given.model}, {'compiled' if given.compiled else 'eager'}")
    print(f"{'':32} {'torch profiler':34} kcap")
    for name, left, right in rows:
        print(f"{name:32} {left:34} {right}")
    print("\nvLLM's profiler: " + ", ".join(f"{name}={value}" for name, value in options.items() if "dir" not in name))


if __name__ == "__main__":
    main()

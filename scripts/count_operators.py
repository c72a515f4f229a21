"""Whether kcap counts what ran: a program's operators by kcap and by torch's profiler, in one run.

    python scripts/count_operators.py [--processes N] PROGRAM [ARGUMENTS…]

Runs PROGRAM under `kcap record`, and under the profiler from the first call of a module on, in N processes of torchrun
where that is asked for. The profiler's outermost operators must be kcap's: those that an operator calls are its detail,
but for a custom operator that calls another one. An operator of tensors without memory (which wrap others, as
functorch's and DTensor do, or are zeros of forward derivatives) is not counted, but what it calls; one of meta tensors,
neither. Under autocast an operator casts its arguments and calls itself; the casts and that call are counted. Kernels
that no dispatcher sees (Triton's, inductor's) are kcap's alone and are not compared. A compiler dispatches much that
computes nothing: of what it does, kcap may count some and need count nothing. What another thread calls outside modules
while the first call opens kcap's window is the profiler's alone, and what runs after the profiler has stopped, at the
program's exit, kcap's.

Prints the operators that differ, then how many are equal; ends with 1 where any differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig, _TensorMetadata
from torch.profiler import ProfilerActivity, profile, record_function

import kcap

COMPILER = "(dynamo_timed)"  # how the profiler's name of a compiler's work ends
SUBCLASS = "PythonSubclass"  # the profiler's name of what a subclass of Tensor does in an operator's place
CAST = "aten::to"
ATEN = ("aten::", "prim::", "prims::")  # what runs inside one of these is its detail
START = "first call of a module"
OWN = ("cpp::", "triton::", "inductor::", "aoti::")  # of operators that no dispatcher sees


class Counts(NamedTuple):
    """Outermost operators: of the program, and of a compiler at work."""

    program: Counter[str]
    compiler: Counter[str]


def profiler() -> profile:
    """One that sees every thread, and of each operator its overload and its tensors."""
    detailed = _ExperimentalConfig(profile_all_threads=True, capture_overload_names=True)
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=detailed)


def count_events(profiled: profile) -> Counts:
    """Count the outermost operators that began with the mark START or after it."""
    assert profiled.profiler is not None
    roots = nested(walk(profiled.profiler.kineto_results.experimental_event_tree()))
    start = min((event.start_time_ns for event in walk(roots) if event.name == START), default=math.inf)
    counts = Counts(Counter(), Counter())
    pending = [(event, counts.program, False) for event in roots]
    while pending:
        event, counter, in_wrapper = pending.pop()
        if COMPILER in event.name:
            counter = counts.compiler
        operator = schema_of(event) if event.start_time_ns >= start else None
        if operator and is_of_shapes(event):
            continue
        wrapped = operator and is_wrapped(event)
        if operator and not is_autocast(event) and (not wrapped or counter is counts.compiler):
            of_shapes = in_wrapper and not tensors_of(event)  # perhaps: its device is not among what the profiler has
            (counts.compiler if of_shapes else counter)[event.name] += 1
        if not operator or is_autocast(event) or wrapped or is_region(event):
            pending += [(child, counter, bool(in_wrapper or wrapped)) for child in event.children]
    return counts


class Event:
    """One of the profiler's, with what ran in it on its own thread.

    The profiler's own tree has what autograd runs on one thread inside what another thread runs at that time.
    """

    def __init__(self, event: Any) -> None:
        self.name, self.overload_name, self.typed = event.name, event.overload_name, event.typed
        self.start_time_ns, self.end_time_ns, self.thread = event.start_time_ns, event.end_time_ns, event.start_tid
        self.children: list[Event] = []


def nested(events: Iterable[Any]) -> list[Event]:
    """The outermost events of each thread."""
    roots: list[Event] = []
    stacks: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(map(Event, events), key=lambda event: (event.start_time_ns, -event.end_time_ns)):
        stack = stacks[event.thread]
        while stack and stack[-1].end_time_ns < event.end_time_ns:
            stack.pop()
        (stack[-1].children if stack else roots).append(event)
        stack.append(event)
    return roots


def walk(events: Sequence[Any]) -> Iterator[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending += event.children


def schema_of(event: Any) -> Any:
    """The schema of the operator that the event is; None: a range that is none, whatever its name."""
    return schemas().get((event.name, event.overload_name))


@functools.cache
def schemas() -> dict[tuple[str, str], Any]:
    return {(schema.name, schema.overload_name): schema for schema in torch._C._jit_get_all_schemas()}


def is_autocast(event: Any) -> bool:
    """Whether it casts arguments and then calls itself, and nothing else."""
    operators = [child for child in event.children if schema_of(child)]
    names = [child.name for child in operators]
    calls_itself = bool(names) and names[-1] == event.name and all(name == CAST for name in names[:-1])
    return calls_itself and not is_wrapped(operators[-1])


def is_region(event: Any) -> bool:
    """Whether it is a custom operator in which another one runs: what is in it counts, too."""
    if event.name.startswith(ATEN):
        return False
    pending = list(event.children)
    while pending:
        inner = pending.pop()
        operator = schema_of(inner)
        if operator and not inner.name.startswith(ATEN):
            return True
        pending += [] if operator else inner.children
    return False


def is_of_shapes(event: Any) -> bool:
    """Whether a tensor among its arguments, or what it converts one to, is on the device `meta`."""
    events = walk([event]) if event.name in (CAST, "aten::_to_copy") else [event]
    return any(tensor.device.type == "meta" for each in events for tensor in tensors_of(each))


def is_wrapped(event: Any) -> bool:
    """Whether a tensor among its arguments wraps others: a subclass's, or one that has elements and stores none."""
    stored = (torch.strided, torch.jagged)
    return any(child.name == SUBCLASS for child in event.children) or any(
        tensor.storage_data_ptr is None and tensor.layout in stored and 0 not in tensor.sizes
        for tensor in tensors_of(event)
    )


def tensors_of(event: Any) -> list[Any]:
    """Among an operator's arguments, also in lists. They come last: a boxed call shows its whole stack."""
    operator = schema_of(event)
    arguments = event.typed[1].inputs[-len(operator.arguments) :] if operator and operator.arguments else []
    lists = (value if isinstance(value, list) else [value] for value in arguments)
    return [value for values in lists for value in values if isinstance(value, _TensorMetadata)]


def count_recording(recording: Any) -> Counter[str]:
    """The invocations of each operator that the dispatcher called, without its overload."""
    counts: Counter[str] = Counter()
    for call in recording.calls:
        if not call.operator.startswith(OWN):
            counts[call.operator.split(".")[0]] += call.total
    return counts


def run_profiled(body: Callable[[], object], output: Path) -> None:
    """Run `body`; write the counts of what ran from the first call of a module on into the directory `output`."""
    original = torch.nn.Module.__call__

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.nn.Module.__call__ = original
        with record_function(START):
            pass
        return original(self, *args, **kwargs)

    torch.nn.Module.__call__ = first_call
    with profiler() as profiled:
        body()
    (output / f"{os.getpid()}.json").write_text(json.dumps(count_events(profiled)))


def run_program(output: Path, arguments: Sequence[str]) -> None:
    """Run a Python program as `python` would, profiled."""
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    run_profiled(lambda: runpy.run_path(arguments[0], run_name="__main__"), output)


def compare(counted: Counter[str], reference: Counts) -> list[str]:
    """A line for each operator that kcap counts otherwise than the profiler."""
    lines = []
    for name in sorted({*counted, *reference.program}):
        least = reference.program[name]
        most = least + reference.compiler[name]
        if not least <= counted[name] <= most:
            more = f" to {most:,}" if most > least else ""
            lines.append(f"{name}: kcap {counted[name]:,}, profiler {least:,}{more}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.inside:
        run_program(options.inside, options.program)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        recording, output = Path(directory, "program.kcap"), Path(directory, "profiled")
        output.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
        words = [*(launcher if options.processes else ()), __file__, "--inside", str(output), *options.program]
        command = [sys.executable, "-m", "kcap", "record", "-o", str(recording), "--", sys.executable, *words]
        status = subprocess.run(command, stdout=sys.stderr).returncode
        counted = count_recording(kcap.load(recording))
        reference = Counts(Counter(), Counter())
        for path in output.iterdir():
            for counter, counts in zip(reference, json.loads(path.read_text()), strict=True):
                counter.update(counts)
    differing = compare(counted, reference)
    print(*differing, sep="\n", end="\n" if differing else "")
    equal = {name for name in counted if not any(line.startswith(f"{name}: ") for line in differing)}
    invocations = sum(counted[name] for name in equal)
    print(f"{len(equal)} operators equal ({invocations:,} invocations), {len(differing)} differ; kcap record: {status}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())

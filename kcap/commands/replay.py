"""`kcap replay`: rebuild recorded calls, or a dataset's Workloads, and time them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click

from kcap.commands import LIMIT, SAMPLING, THREADS
from kcap.errors import CallError
from kcap.replay.jobs import Choice
from kcap.replay.options import CallOptions, FidelityOptions, ProgramOptions
from kcap.schemas.recording.recording import PHASES, Phase
from kcap.schemas.results.measurement import CACHES, Cache
from kcap.show.progress import progress
from kcap.system.machine import check_device
from kcap.system.output import check_files


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--device", help="cuda, cuda:N or cpu.  [default: what it was recorded on]")
@click.option("--op", "globs", multiple=True, metavar="GLOB", help="Only operators (Definitions) that match.")
@click.option("--phase", type=click.Choice(PHASES), help="Only what ran in this phase.")
@click.option("--top", type=click.IntRange(min=1), help="Only the N most frequent calls.")
@click.option("--rows", type=click.IntRange(min=1), default=40, show_default=True, help="Rows of the table.")
@click.option("--include-views", "--all", "views", is_flag=True, help="Views and allocations too.")
@click.option("--keep-going", is_flag=True, help="Skip and count the bad lines of a trace file.")
@click.option(
    "--seconds",
    type=SAMPLING,
    default=0.1,
    show_default=True,
    help="Sampling per call or Program; a fifth of it for calls that hardly count.",
)
@click.option("--timeout", type=LIMIT, default=60, show_default=True, help="Seconds per call at most.")
@click.option(
    "--cache",
    type=click.Choice(CACHES),
    default="serving",
    show_default=True,
    help="On a GPU: none of the inputs in the caches, all that fits, or small activations but no weights or caches.",
)
@click.option(
    "--kernel-durations",
    "--kernels",
    "kernel_durations",
    is_flag=True,
    help="On a GPU: the durations of the kernels too, by the profiler, in a separate pass.",
)
@click.option("--program", is_flag=True, help="Whole steps and captured graphs, with their kernels in order.")
@click.option(
    "--step", type=click.IntRange(min=0), metavar="ID", help="The Program of this recorded step (implies --program)."
)
@click.option("--threads", type=THREADS, help="CPU threads.  [default: torch's]")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record or export here yourself.")
@click.option(
    "--compare-engine",
    "--fidelity",
    "fidelity",
    is_flag=True,
    help="Compare the replay with the engine's GPU time in the steps of --check-coverage.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path),
    help="Write each measurement as a line of JSON (--compare-engine: a folder).",
)
@click.option("--force", is_flag=True, help="Overwrite the output.")
def command(
    path: Path,
    device: str | None,
    globs: tuple[str, ...],
    phase: str | None,
    top: int | None,
    rows: int,
    views: bool,
    keep_going: bool,
    seconds: float,
    timeout: float,
    cache: str,
    kernel_durations: bool,
    program: bool,
    step: int | None,
    threads: int | None,
    trust: bool,
    fidelity: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> int:
    """Rebuild the arguments of the recorded kernels and time each kernel on all its Samples.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset. Of a dataset, each
    Definition's reference is timed on each of its Workloads: that is code, which runs only with --trust, unless you
    exported the dataset here yourself. Each kernel runs in a child process with a time limit. Exit code: 0 all
    replayed, 1 a kernel failed, 3 some were skipped, if only on one of their Samples.

    With --program: the most frequent step of each phase, use of graphs and padded size, or the one of --step, as a
    whole, in one CUDA graph if possible. With --compare-engine: the steps that kcap record --check-coverage profiled,
    each kernel and the whole, compared with the engine's own GPU time; exit code 3: outside the bounds. Both choose
    what to replay: they take no --cache, --op, --include-views or --keep-going; --step takes no --phase or --top,
    either, and --compare-engine no --threads and no CPU.

    \b
    Example:
      kcap replay llama.kcap --phase decode -o llama.measurements.jsonl
      kcap replay llama.kcap --cache cold --kernel-durations --op '*rms_norm*'
      kcap replay llama.kcap --program --phase decode -o llama.programs.jsonl
      kcap replay flashinfer-trace --trust --op 'rmsnorm*'
      kcap replay llama.kcap --compare-engine -o llama.fidelity
    """
    check_device(device)
    if output is not None:
        check_files(output, force, [path], folder=fidelity)
    chosen_phase = cast("Phase | None", phase)
    calls_only = {  # --kernel-durations is what the others do anyway
        "--cache": cache != "serving",
        "--op": globs,
        "--include-views": views,
        "--keep-going": keep_going,
    }
    if fidelity:
        from kcap.replay.fidelity.run import replay_fidelity

        more = {"--phase": phase, "--top": top, "--threads": threads, "--program": program, "--step": step}
        refuse(calls_only | more, "--compare-engine")
        fidelity_options = FidelityOptions(device, seconds, timeout, trust, rows, as_json, output)
        return replay_fidelity(path, fidelity_options, progress())
    if program or step is not None:
        from kcap.replay.program.run import replay_programs

        refuse(calls_only, "--program")
        refuse({"--phase": phase, "--top": top} if step is not None else {}, "--step")
        program_options = ProgramOptions(
            step, chosen_phase, top, seconds, timeout, device, threads, trust, rows, as_json
        )
        return replay_programs(path, program_options, output, progress())
    from kcap.replay.calls.run import replay_calls

    choice = Choice(globs, chosen_phase, top, views)
    call_options = CallOptions(
        choice,
        keep_going,
        seconds,
        timeout,
        device,
        cast("Cache", cache),
        kernel_durations,
        threads,
        trust,
        rows,
        as_json,
    )
    return replay_calls(path, call_options, output)


def refuse(values: Mapping[str, object], option: str) -> None:
    """CallError where one of the options in `values` was passed, which mean nothing beside `option`."""
    if passed := [name for name, value in values.items() if value is not None and value is not False and value != ()]:
        raise CallError(f"{option} chooses what to replay: leave out {', '.join(passed)}")

"""`kcap replay`: rebuild recorded calls, or a dataset's Workloads, and time them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click

from kcap.errors import CallError
from kcap.replay.jobs import Choice
from kcap.replay.options import EachOptions, FidelityOptions, ProgramOptions
from kcap.schemas.recording.recording import PHASES, Phase
from kcap.schemas.results.measurement import CACHES
from kcap.show.progress import progress


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--device", help="cuda, cuda:N or cpu.  [default: what it was recorded on]")
@click.option("--op", "globs", multiple=True, metavar="GLOB", help="Only operators (Definitions) that match.")
@click.option("--phase", type=click.Choice(PHASES), help="Only what ran in this phase.")
@click.option("--top", type=click.IntRange(min=1), help="Only the N most frequent calls.")
@click.option("--rows", type=click.IntRange(min=1), default=40, show_default=True, help="Rows of the table.")
@click.option("--all", "views", is_flag=True, help="Views and allocations too.")
@click.option("--keep-going", is_flag=True, help="Skip and count the bad lines of a trace file.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.001),
    default=0.1,
    show_default=True,
    help="Sampling per call or Program; a fifth of it for calls that hardly count.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=60, show_default=True, help="Seconds per call at most."
)
@click.option(
    "--cache",
    type=click.Choice(CACHES),
    default="serving",
    show_default=True,
    help="On a GPU: none of the inputs in the caches, all that fits, or small activations but no weights or caches.",
)
@click.option("--kernels", is_flag=True, help="On a GPU: kernel durations by the profiler, too, in a pass of its own.")
@click.option("--program", is_flag=True, help="Whole steps and captured graphs, their kernels in their order.")
@click.option("--step", type=click.IntRange(min=0), metavar="ID", help="With --program: the one of this recorded step.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's]")
@click.option("--trust", is_flag=True, help="Run code of PATH that you did not record here yourself.")
@click.option("--fidelity", is_flag=True, help="Hold the replay against the GPU time of --check-coverage's steps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help="Write a measurement a line (--fidelity: a folder)."
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
    kernels: bool,
    program: bool,
    step: int | None,
    threads: int | None,
    trust: bool,
    fidelity: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> int:
    """Rebuild the recorded kernels' arguments and time each, on all its Samples.

    PATH is a Recording, a BackendBench trace file or parquet, or a FlashInfer-Bench dataset, of which each Definition's
    reference is timed on each of its Workloads: that is code from elsewhere, which runs only with --trust. Each kernel
    runs in a child process with a time limit. Exit code: 0 all replayed, 1 a kernel failed, 3 some were skipped.

    With --program: of each phase, use of graphs and padded size the most frequent step, or the one of --step, as a
    whole, in one CUDA graph where that can be. With --fidelity: each kernel and the whole of the steps that kcap record
    --check-coverage profiled, held against the engine's own GPU time; 3: outside the bounds.

    \b
    Example:
      kcap replay llama.kcap --phase decode -o llama.measurements.jsonl
      kcap replay llama.kcap --cache cold --kernels --op '*rms_norm*'
      kcap replay llama.kcap --program --phase decode -o llama.programs.jsonl
      kcap replay flashinfer-trace --trust --op 'rmsnorm*'
      kcap replay llama.kcap --fidelity -o llama.fidelity
    """
    check_options(device, output, force)
    states = {"--cache": cache != "serving"}  # --kernels they do anyway
    of_phase = cast("Phase | None", phase)
    if fidelity:
        more = {"--op": globs, "--all": views, "--keep-going": keep_going, "--program": program, "--step": step}
        refuse({"--phase": phase, "--top": top, "--threads": threads, **states, **more}, "--fidelity")
        return held_against_engine(path, FidelityOptions(device, seconds, timeout, trust, rows, as_json, output))
    if program or step is not None:
        refuse({"--op": globs, "--all": views, "--keep-going": keep_going, **states}, "--program")
        refuse({"--phase": phase, "--top": top} if step is not None else {}, "--step")
        whole = ProgramOptions(step, of_phase, top, seconds, timeout, device, threads, trust, rows, as_json)
        return whole_programs(path, whole, output)
    from kcap.replay.calls.run import replay_each

    choice = Choice(globs, of_phase, top, views)
    each = EachOptions(choice, keep_going, seconds, timeout, device, cache, kernels, threads, trust, rows, as_json)
    return replay_each(path, each, output)


def check_options(device: str | None, output: Path | None, force: bool) -> None:
    if device is not None and device != "cpu" and not (device == "cuda" or device.removeprefix("cuda:").isdecimal()):
        raise CallError(f"--device {device}: not a device that kcap knows: cuda, cuda:N or cpu")
    if output is not None and output.exists() and not force:
        raise CallError(f"{output}: already exists: pass --force")


def refuse(given: Mapping[str, object], beside: str) -> None:
    """CallError for the options in `given` that were passed, which mean nothing beside another one."""
    if passed := [name for name, value in given.items() if value is not None and value is not False and value != ()]:
        raise CallError(f"{beside} replays what it has to: leave out {', '.join(passed)}")


def held_against_engine(path: Path, options: FidelityOptions) -> int:
    from kcap.replay.fidelity.run import replay_fidelity as fidelity

    return fidelity(path, options, progress())


def whole_programs(path: Path, options: ProgramOptions, output: Path | None) -> int:
    from kcap.replay.program.run import replay_programs

    return replay_programs(path, options, output, progress())

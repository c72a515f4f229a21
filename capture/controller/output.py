"""Where a Recording is written, and what is said of it then."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from kcap.schemas.recording.recording import Recording
from kcap.schemas.results.coverage import CoverageSummary
from kcap.system.output import check_output, describe_leftover, make_directory_beside, publish


@dataclass(frozen=True)
class WorkingDirectory:
    """`directory`: where to write. `noted`: whatever is entered here lasts until the output is in its place."""

    directory: Path
    noted: ExitStack


@contextmanager
def working_directory(output: Path, force: bool) -> Iterator[WorkingDirectory]:
    """A working directory beside `output`, moved there when all went well; what was recorded is kept if not."""
    check_output(output, force)
    directory = make_directory_beside(output)
    with ExitStack() as noted:
        try:
            yield WorkingDirectory(directory, noted)
            publish(directory, output, force)
        except BaseException:
            if left := describe_leftover(directory, output):
                click.echo(f"kcap: {left}", err=True)
            else:
                shutil.rmtree(directory, ignore_errors=True)
            raise


def report_recording(recording: Recording, output: Path) -> None:
    metadata = recording.metadata
    steps = ", ".join(f"{times} {phase}" for phase, times in metadata.steps.items()) or "none"
    kernels, calls = metadata.totals.get("kernels", 0), metadata.totals.get("calls", 0)
    click.echo(f"{output}: {kernels} kernel calls ({calls} distinct calls) in steps: {steps}", err=True)
    for tap in metadata.taps:
        if tap.status == "failed":
            click.echo(f"kcap: {tap.name} failed in process {tap.pid} (rank {tap.rank}): {tap.detail}", err=True)
    for disagreement in metadata.disagreements:
        click.echo(f"kcap: {disagreement.text}", err=True)
    if metadata.coverage is not None:
        from kcap.capture.fold import coverage

        click.echo("\n".join(coverage.coverage_lines(CoverageSummary.model_validate(metadata.coverage))), err=True)
    if not metadata.complete:
        click.echo("kcap: the Recording is partial; kcap show says why", err=True)
    click.echo(f"Next: kcap show {shlex.quote(str(output))}", err=True)

"""Where a Recording is written, and what is said of it then."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

import click

from kcap.capture.controller.window_control import refuse_written
from kcap.capture.fold.metadata import why_empty
from kcap.errors import KcapError
from kcap.schemas.recording.recording import Recording, load
from kcap.schemas.recording.records import kernel_invocations
from kcap.schemas.results.coverage import CoverageSummary
from kcap.system.output import check_output, describe_leftover, make_directory_beside, publish
from kcap.system.redact import HIDDEN


@dataclass(frozen=True)
class WorkingDirectory:
    """`directory`: where to write. `noted`: whatever is entered here lasts until the output is in its place."""

    directory: Path
    noted: ExitStack


@contextmanager
def working_directory(output: Path, force: bool) -> Iterator[WorkingDirectory]:
    """A working directory beside `output`, moved there when all went well; what was recorded is kept if not."""
    check_output(output, force)
    refuse_written(output)
    directory = make_directory_beside(output)
    with ExitStack() as noted:
        try:
            yield WorkingDirectory(directory, noted)
            publish(directory, output, force)
        except BaseException as error:
            if isinstance(error, FileNotFoundError) and not directory.exists():
                raise KcapError(f"{directory}, where kcap was recording, was removed meanwhile: record again") from None
            if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT) and error.filename is None:
                error.filename = str(output)
            if left := describe_leftover(directory, output):
                click.echo(f"kcap: {left}", err=True)
            else:
                shutil.rmtree(directory, ignore_errors=True)
            raise


def report_recording(recording: Recording, output: Path, failure: str = "") -> None:
    """Say what was recorded and what of it failed (`failure`: of the run itself), and which command comes next."""
    metadata = recording.metadata
    steps = ", ".join(f"{times} {phase}" for phase, times in metadata.steps.items()) or "none"
    distinct = sum(call.total > 0 for call in recording.kernels())
    counted = f"{kernel_invocations(recording.calls):,} invocations of {distinct:,} distinct calls"
    click.echo(f"{output}: {counted} in steps: {steps}", err=True)
    for tap in metadata.taps:
        if tap.status == "failed":
            hint = "; kcap doctor says which hooks an engine has" if tap.name == "window" else ""
            click.echo(f"kcap: {tap.name} failed in process {tap.pid} (rank {tap.rank}): {tap.detail}{hint}", err=True)
    for disagreement in metadata.disagreements:
        click.echo(f"kcap: {disagreement.text}", err=True)
    if metadata.coverage is not None:
        from kcap.capture.fold import coverage

        click.echo("\n".join(coverage.coverage_lines(CoverageSummary.model_validate(metadata.coverage))), err=True)
    if 0 < len(metadata.ranks) < metadata.world_size:
        click.echo(f"kcap: {len(metadata.ranks)} of {metadata.world_size} ranks were recorded here", err=True)
    if failure:
        click.echo(f"kcap: {failure}", err=True)
    next_command = ["kcap", "show", str(output)]
    if is_empty(recording):
        click.echo(f"kcap: nothing was recorded: {why_empty(metadata)}", err=True)
        if metadata.command and not metadata.client and HIDDEN not in " ".join(metadata.command):
            next_command = ["kcap", "record", "--force", "-o", str(output), "--", *metadata.command]
    elif not metadata.complete:
        click.echo("kcap: the Recording is partial; kcap show says why", err=True)
    click.echo(f"Next: {shlex.join(next_command)}", err=True)


def why_not_replaced(recording: Recording, output: Path) -> str:
    """Why what lies at `output` stays: it has calls, and `recording` has none; else empty."""
    if not is_empty(recording) or not _has_calls(output):
        return ""
    return f"nothing was recorded: {why_empty(recording.metadata)}; {output} stays as it was"


def _has_calls(path: Path) -> bool:
    try:
        return not is_empty(load(path))
    except (KcapError, OSError):  # none, or one that cannot be read
        return False


def is_empty(recording: Recording) -> bool:
    """Whether no call in it counts."""
    return not any(call.total for call in recording.calls)

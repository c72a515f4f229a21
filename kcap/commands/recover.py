"""`kcap recover`: make a Recording of what an interrupted recording left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from kcap.errors import PARTIAL, CallError

EXAMPLE = """
\b
Example:
  kcap recover .llama.kcap.f3k2x9 -o llama.kcap
"""


@click.command(name="recover", epilog=EXAMPLE)
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Recording to write.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def command(directory: Path, output: Path, force: bool) -> None:
    """Make a Recording of DIRECTORY, which a `kcap record` that could not finish (a full disk) left and named.

    Exit code: 0 done, 3 the Recording is partial.
    """
    from kcap.capture.controller.output import report_recording, working_directory
    from kcap.capture.fold.recording import fold_session
    from kcap.capture.session import read_session

    shards = directory / "shards"
    if not (shards / "session.json").is_file():
        raise CallError(f"{directory}: nothing to recover: it has no shards/session.json")
    session = replace(read_session(shards / "session.json"), directory=str(shards))
    with working_directory(output, force) as work:
        recording = fold_session(session, work.directory, sealed=False)  # anybody may have made the shards
    report_recording(recording, output)
    if not recording.metadata.complete:
        raise click.exceptions.Exit(PARTIAL)

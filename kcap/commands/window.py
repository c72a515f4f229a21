"""`kcap window`: open and close the window of a recording that runs."""

from __future__ import annotations

from pathlib import Path

import click

from kcap.capture.controller import window_control
from kcap.errors import PARTIAL

EXAMPLE = """
\b
Example:
  kcap record -o serve.kcap --window manual -- vllm serve meta-llama/Llama-3.1-8B     # in one shell
  kcap window start serve.kcap                                                        # in another, once it is busy
  kcap window stop serve.kcap
"""


@click.command(name="window", epilog=EXAMPLE)
@click.argument("action", type=click.Choice(["start", "stop"]))
@click.argument("output", type=click.Path(path_type=Path), metavar="DIR")
def command(action: str, output: Path) -> None:
    """Open (start) or close (stop) the window of the `kcap record -o DIR` that runs on this machine.

    What runs counts only while the window is open; it may be opened several times. A step that had begun before the
    start, or has not ended before the stop, does not count. SIGUSR1 and SIGUSR2, sent to `kcap record`, do the same.
    Exit code: 0 done, 1 no such recording runs or its window has closed for good, 3 a process does not answer.
    """
    session = window_control.find_session(output)
    answer = window_control.open_window(session) if action == "start" else window_control.close_window(session)
    click.echo(f"kcap: {window_control.answer_text(answer, action == 'start')}", err=True)
    if answer.silent:
        raise click.exceptions.Exit(PARTIAL)

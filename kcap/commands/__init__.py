"""The subcommands of `kcap`, one file each: options in, exit code out. What they do lies in the packages beside."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource


def given_options(names: Collection[str]) -> str:
    """Those of the parameters `names` that the user gave, as one writes them: `--op, --top`; empty if none."""
    context = click.get_current_context()
    given = {name for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    return ", ".join(option.opts[0] for option in context.command.params if option.name in given)

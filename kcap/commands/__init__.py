"""The subcommands of `kcap`, one file each: options in, exit code out. What they do lies in the packages beside."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import click
from click.core import ParameterSource

MOST_SECONDS = 1e6  # eleven days: systems wait no longer than some weeks


class FiniteRange(click.FloatRange):
    """As `click.FloatRange`, which takes what is no number, and what is infinite, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number in the range {self._describe_range()}.", param, ctx)
        return number


LIMIT = FiniteRange(min=0.1, max=MOST_SECONDS)  # seconds that something takes at most
SAMPLING = FiniteRange(min=0.001, max=MOST_SECONDS)  # seconds
GIBIBYTES = FiniteRange(min=0.1, max=1 << 20)
THREADS = click.IntRange(min=1, max=4096)


def given_options(names: Collection[str]) -> str:
    """Those of the parameters `names` that the user gave, as one writes them: `--op, --top`; empty if none."""
    context = click.get_current_context()
    given = {name for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    return ", ".join(option.opts[0] for option in context.command.params if option.name in given)

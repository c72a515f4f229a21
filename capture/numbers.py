"""An option's number, or several with commas between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

Numbers = int | Sequence[int]


def listed(numbers: Numbers) -> list[int]:
    return [numbers] if isinstance(numbers, int) else list(numbers)


class NumbersRange(click.IntRange):
    """What `click.IntRange` takes, and several such numbers: a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        words: list[Any] = str(value).split(",")
        if len(words) == 1:
            return super().convert(value, param, ctx)
        return tuple(super(NumbersRange, self).convert(word, param, ctx) for word in words)

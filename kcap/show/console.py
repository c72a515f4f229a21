"""Where every command prints its tables, how wide they are, and how they write a time over its floor."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200
GAP = 2  # blanks between two columns
LEAST_LAST = 4  # columns of the last one, however narrow the terminal
MAX_FLOOR_FACTOR = 999  # beyond it the number means nothing


def console() -> Console:
    """Standard output; as wide as the terminal or COLUMNS, and where neither is known wide enough for a long row."""
    out = Console(highlight=False, markup=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPED_WIDTH
    return out


def plain_table(numbers: Sequence[str], texts: Sequence[str]) -> Table:
    """A table without rules: columns of `numbers` to the right, then columns of `texts`, no row of more than a line."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in texts:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a `plain_table`; its last column has what the others leave of the width, and is cut there."""
    widths = [max((_width(cell) for cell in (column.header, *column.cells)), default=0) for column in table.columns]
    table.columns[-1].max_width = max(out.width - sum(width + GAP for width in widths[:-1]), LEAST_LAST)
    out.print(table)


def floor_factor(factor: float | None) -> str:
    """Two or three digits: `1.4`, `27`, `310`; `…` for nearly no work; nothing if there is no floor."""
    if factor is None:
        return ""
    if factor > MAX_FLOOR_FACTOR:
        return "…"
    return f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"


def _width(cell: object) -> int:
    return cell.cell_len if isinstance(cell, Text) else len(str(cell))

"""What `kcap show` says of a FlashInfer-Bench dataset: its Definitions, and how much there is of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kcap.schemas.flashinfer.dataset import Dataset, invocations
from kcap.schemas.flashinfer.definition import SafetensorsInput, Workload
from kcap.show.console import GAP

LEAST_AXES = 24  # columns; with fewer the type goes


@dataclass(frozen=True, slots=True)
class DefinitionRow:
    """`count`: invocations that the dataset's workloads stand for (0: it does not tell); `missing`: workloads that
    name a blob which is not there."""

    name: str
    op_type: str
    axes: dict[str, int | None]
    workloads: int
    missing: int
    solutions: int
    traces: int
    count: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def definition_rows(dataset: Dataset) -> list[DefinitionRow]:
    """One row a Definition: the most often invoked first, then by type and name."""
    counts = invocations(dataset.counts)
    rows = [
        DefinitionRow(
            name,
            definition.op_type,
            {axis: definition.const_axes.get(axis) for axis in definition.axes},
            len(dataset.workloads.get(name, ())),
            sum(_misses_blob(dataset, workload) for workload in dataset.workloads.get(name, ())),
            len(dataset.solutions.get(name, ())),
            len(dataset.traces.get(name, ())),
            counts[name],
        )
        for name, definition in dataset.definitions.items()
    ]
    return sorted(rows, key=lambda row: (-row.count, row.op_type, row.name))


def _misses_blob(dataset: Dataset, workload: Workload) -> bool:
    blobs = [value for value in workload.inputs.values() if isinstance(value, SafetensorsInput)]
    return not all(dataset.blob_file(blob).is_file() for blob in blobs)


def definition_table(rows: Sequence[DefinitionRow], width: int) -> Table:
    """The rows for `print_table`; `·` stands for an axis that varies.

    Names are whole: Solutions are written against them. The type, which most names begin with, goes where `width` is
    short.
    """
    numbers = {
        "workloads": [row.workloads for row in rows],
        "without blob": [row.missing for row in rows],
        "solutions": [row.solutions for row in rows],
        "traces": [row.traces for row in rows],
        "count": [row.count for row in rows],
    }
    columns = {name: [f"{n:,}" if n else "·" for n in column] for name, column in numbers.items() if any(column)}
    texts = {"definition": [row.name for row in rows], "type": [row.op_type for row in rows]}
    widths = [max(map(len, (name, *column))) + GAP for name, column in (texts | columns).items()]
    if sum(widths) + LEAST_AXES > width:
        del texts["type"]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("axes", no_wrap=True, overflow="ellipsis")
    axes = (", ".join(f"{name}={'·' if size is None else size}" for name, size in row.axes.items()) for row in rows)
    for cells in zip(*texts.values(), *columns.values(), axes, strict=True):
        table.add_row(*cells)
    return table

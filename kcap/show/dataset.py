"""What `kcap show` says of a FlashInfer-Bench dataset: its Definitions, and how much there is of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kcap.schemas.flashinfer.dataset import Dataset, invocations
from kcap.schemas.flashinfer.definition import SafetensorsInput, Workload


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


def definition_table(rows: Sequence[DefinitionRow]) -> Table:
    """The rows for people; `·` stands for an axis that varies. Names are whole: Solutions are written against them."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("definition", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("axes", no_wrap=True, overflow="ellipsis")
    numbers = {
        "workloads": [row.workloads for row in rows],
        "without blob": [row.missing for row in rows],
        "solutions": [row.solutions for row in rows],
        "traces": [row.traces for row in rows],
        "count": [row.count for row in rows],
    }
    columns = {name: column for name, column in numbers.items() if any(column)}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        axes = ", ".join(f"{name}={'·' if size is None else size}" for name, size in row.axes.items())
        cells = (f"{column[index]:,}" if column[index] else "·" for column in columns.values())
        table.add_row(row.name, row.op_type, axes, *cells)
    return table

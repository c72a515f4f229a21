"""Run the reference of every Definition of a dataset on rebuilt inputs of its Workloads, each in a process of its own.

    python scripts/run_references.py DATASET [--device cuda] [--small] [--most N] [--timeout SECONDS] [--limit GIB]

A Definition without Workloads runs on made-up axes; `--small` runs all of them on those alone. `--most`: Workloads of
each Definition, 0: all. Ends with 1 if a reference failed, with 3 if one was skipped.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import click

from kcap.errors import DONE, FAILED, PARTIAL
from kcap.replay.datasets.reference import ReferenceResult, References
from kcap.replay.datasets.workloads import default_workload
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, Workload
from kcap.schemas.results.measurement import MADE_UP

GIB = 1 << 30


def row(definition: Definition, results: list[ReferenceResult], seconds: float) -> str:
    """One line of the table."""
    counts = Counter(result.status for result in results)
    said = Counter(text for result in results for text in told(result))
    notes = "; ".join(f"{text} ({count})" if count > 1 else text for text, count in said.items())
    return (
        f"{definition.name:<62} {counts['ok']:>4} {counts['skipped']:>4} {counts['failed']:>4} {seconds:>7.1f}  {notes}"
    )


def told(result: ReferenceResult) -> list[str]:
    """Its reason and notes without what differs from Workload to Workload, and outputs that are not finite."""
    wild = [o.name for o in result.outputs if o.nan or o.inf]
    notes = ["blobs made up" if note.startswith(MADE_UP) else note.split(":")[0] for note in result.notes]
    reason = [result.reason] if result.reason else []
    return [*reason, *dict.fromkeys(notes), *([f"not finite: {', '.join(wild)}"] if wild else [])]


def workloads_of(dataset: Dataset, definition: Definition, small: bool, most: int) -> list[Workload]:
    given = [] if small else dataset.workloads.get(definition.name, [])
    return (given[:most] if most else given) or [default_workload(definition)]


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


@click.command(help=__doc__)
@click.argument("root", metavar="DATASET", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cpu", show_default=True)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for one reference and its inputs.")
@click.option("--limit", type=float, help="GiB that inputs and outputs may take (default: half of what is free).")
@click.option("--memory", type=float, help="GiB that one reference may take (default: what is free).")
@click.option("--most", default=0, show_default=True)
@click.option("--small", is_flag=True)
def main(
    root: Path, device: str, timeout: float, limit: float | None, memory: float | None, most: int, small: bool
) -> None:
    dataset, counts, began = Dataset.load(root), Counter[str](), time.monotonic()
    print(f"{'definition':<62}  ran skip fail seconds  notes")
    with References(root, device, _bytes(limit), _bytes(memory)) as references:
        for definition in dataset.definitions.values():
            start = time.monotonic()
            given = workloads_of(dataset, definition, small, most)
            results = [references.run(definition, workload, timeout) for workload in given]
            counts.update(result.status for result in results)
            print(row(definition, results, time.monotonic() - start), flush=True)
    total = f"{counts['ok']} ran, {counts['skipped']} skipped, {counts['failed']} failed"
    print(f"{len(dataset.definitions)} Definitions: {total} in {time.monotonic() - began:.0f} s")
    sys.exit(FAILED if counts["failed"] else PARTIAL if counts["skipped"] else DONE)


if __name__ == "__main__":
    main()

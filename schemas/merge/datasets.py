"""Several FlashInfer-Bench datasets as one: Definitions join by name and content, Workloads by uuid, counts add.

Tags of one Definition are joined; it is verified if it is so in one of the datasets. A Call of two datasets is the
same where its Definition, its operator and its Workloads are; the others are numbered on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kcap.errors import CallError
from kcap.schemas.flashinfer.dataset import Dataset, WorkloadCount
from kcap.schemas.flashinfer.definition import DRAFT, VERIFIED, Definition, Workload
from kcap.schemas.recording.records import add_counts

CallKey = tuple[str, str, tuple[str, ...], int]


def merge_datasets(root: Path, datasets: Sequence[Dataset]) -> Dataset:
    """What the merged dataset in `root` will hold, but for Solutions, Traces and blobs, which are files that are
    copied. CallError names the Definitions or Workloads that differ under one name."""
    check_same(datasets)
    definitions: dict[str, Definition] = {}
    workloads: dict[str, dict[str, Workload]] = {}
    for dataset in datasets:
        for name, definition in dataset.definitions.items():
            merged = definitions.get(name)
            definitions[name] = _tagged(merged, definition) if merged else definition
        for name, dataset_workloads in dataset.workloads.items():
            workloads.setdefault(name, {}).update({workload.uuid: workload for workload in dataset_workloads})
    counts = list(merge_counts([dataset.counts for dataset in datasets]))
    return Dataset(
        root,
        definitions,
        {name: list(dataset_workloads.values()) for name, dataset_workloads in workloads.items()},
        counts=counts,
    )


def check_same(datasets: Sequence[Dataset]) -> None:
    definitions: dict[str, Definition] = {}
    workloads: dict[tuple[str, str], Workload] = {}
    differing: list[str] = []
    for dataset in datasets:
        for name, definition in dataset.definitions.items():
            if changed_fields(definitions.setdefault(name, definition), definition):
                differing.append(name)
        for name, dataset_workloads in dataset.workloads.items():
            differing += [f"{name} {w.uuid}" for w in dataset_workloads if workloads.setdefault((name, w.uuid), w) != w]
    if differing:
        names = ", ".join(dict.fromkeys(differing))
        raise CallError(f"different content under one name: {names}: rename one (kcap diff shows how they differ)")


def changed_fields(one: Definition, other: Definition) -> list[str]:
    """The fields, but for tags and description, in which two Definitions differ."""
    first, second = (definition.model_dump(exclude={"tags", "description"}) for definition in (one, other))
    fields = dict.fromkeys([*first, *second])
    return [name for name in fields if _ordered(first.get(name)) != _ordered(second.get(name))]


def _ordered(value: object) -> object:
    """The order of inputs and outputs is part of a Definition."""
    return list(value.items()) if isinstance(value, dict) else value or None


def _tagged(one: Definition, other: Definition) -> Definition:
    tags = dict.fromkeys([*one.tags, *other.tags])
    if VERIFIED in tags:
        tags.pop(DRAFT, None)
    return one if list(tags) == one.tags else one.model_copy(update={"tags": sorted(tags)})


def merge_counts(several: Iterable[Sequence[WorkloadCount]]) -> Iterator[WorkloadCount]:
    """The lines of counts.jsonl: those of one Call share its number, and its counts."""
    lines_by_call: dict[CallKey, list[WorkloadCount]] = {}
    taken: set[int] = set()
    for counts in several:
        for key, lines in _calls(counts).items():
            if merged := lines_by_call.get(key):
                summed = add_counts([*merged[0].counts, *lines[0].counts])
                lines_by_call[key] = [line.model_copy(update={"counts": summed}) for line in merged]
                continue
            number = lines[0].call if lines[0].call not in taken else max(taken) + 1
            taken.add(number)
            lines_by_call[key] = [line.model_copy(update={"call": number}) for line in lines]
    for lines in lines_by_call.values():
        yield from lines


def _calls(counts: Sequence[WorkloadCount]) -> dict[CallKey, list[WorkloadCount]]:
    """Lines by Call; equal Calls are distinguished by their order."""
    groups: dict[tuple[str, str, int], list[WorkloadCount]] = {}
    for line in counts:
        groups.setdefault((line.definition, line.operator, line.call), []).append(line)
    alike: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    lines_by_call: dict[CallKey, list[WorkloadCount]] = {}
    for (definition, operator, _), lines in groups.items():
        key = (definition, operator, tuple(sorted(line.workload for line in lines)))
        lines_by_call[(*key, alike[key])] = lines
        alike[key] += 1
    return lines_by_call

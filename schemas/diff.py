"""How two sets of Calls, or of Definitions, differ: what only one has, and what both have in other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.merge.datasets import changed_fields
from kcap.schemas.recording.records import Call, Count
from kcap.schemas.recording.signature import call_key, call_signature


@dataclass(frozen=True)
class Entry:
    """A Call or a Definition. `counts`: invocations by `phase rank mode`, a Definition's Workloads under `workloads`;
    `counted`: how many of them are part of the total (a region's are not, nor a view's). `told`: of a fused kernel,
    whether the operators that it stands for are."""

    name: str
    detail: str
    counts: Mapping[str, int]
    counted: int
    told: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "detail": self.detail, "counts": dict(self.counts)}


@dataclass(frozen=True)
class Changed:
    """What both have, with other counts, or (`fields`) with other content."""

    a: Entry
    b: Entry
    fields: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        head = {"name": self.a.name, "detail": self.a.detail, "fields": self.fields}
        return {**head, "a": dict(self.a.counts), "b": dict(self.b.counts)}


@dataclass(frozen=True)
class Share:
    """All entries of one name: invocations in `a` and `b`."""

    name: str
    a: int
    b: int


@dataclass(frozen=True)
class Diff:
    """`totals`: invocations of kernels in a and b, which shares are of; `names`: those whose sums differ."""

    only_a: list[Entry]
    only_b: list[Entry]
    changed: list[Changed]
    names: list[Share]
    totals: tuple[int, int]

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.changed)

    def as_json(self) -> dict[str, Any]:
        a, b = self.totals
        names = [
            {"name": s.name, "a": s.a, "b": s.b, "a_share": _share(s.a, a), "b_share": _share(s.b, b)}
            for s in self.names
        ]
        return {
            "equal": self.equal,
            "totals": {"a": a, "b": b},
            "names": names,
            "only_a": [entry.as_json() for entry in self.only_a],
            "only_b": [entry.as_json() for entry in self.only_b],
            "changed": [changed.as_json() for changed in self.changed],
        }


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def diff_calls(a: Iterable[Call], b: Iterable[Call]) -> Diff:
    """Calls by `call_key`: how they are numbered and ordered does not matter. What fused kernels stand for may be told
    in other words, but not in one alone."""
    first, second = _calls(a), _calls(b)
    differ = [key for key in first.keys() & second.keys() if first[key].told != second[key].told]
    return _diff(first, second, {key: ["fragment"] for key in differ})


def diff_datasets(a: Dataset, b: Dataset) -> Diff:
    """Definitions by name, with their counts and their Workloads, whatever these are called."""
    common = a.definitions.keys() & b.definitions.keys()
    fields = {name: changed_fields(a.definitions[name], b.definitions[name]) for name in common}
    for name in common:
        as_many = len(a.workloads.get(name, ())) == len(b.workloads.get(name, ()))
        if as_many and _contents(a, name) != _contents(b, name):
            fields[name] = [*fields[name], "workloads"]
    return _diff(_definitions(a), _definitions(b), fields)


def _diff(a: Mapping[str, Entry], b: Mapping[str, Entry], fields: Mapping[str, list[str]]) -> Diff:
    changed = [
        Changed(a[key], b[key], fields.get(key, []))
        for key in a
        if key in b and (a[key].counts != b[key].counts or fields.get(key))
    ]
    return Diff(
        only_a=_sorted(entry for key, entry in a.items() if key not in b),
        only_b=_sorted(entry for key, entry in b.items() if key not in a),
        changed=sorted(
            changed, key=lambda change: (-abs(change.a.counted - change.b.counted), change.a.name, change.a.detail)
        ),
        names=_names(a.values(), b.values()),
        totals=(sum(entry.counted for entry in a.values()), sum(entry.counted for entry in b.values())),
    )


def _sorted(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (-entry.counted, entry.name, entry.detail))


def _names(a: Iterable[Entry], b: Iterable[Entry]) -> list[Share]:
    first, second = _by_name(a), _by_name(b)
    shares = [Share(name, first[name], second[name]) for name in dict.fromkeys([*first, *second])]
    return sorted((s for s in shares if s.a != s.b), key=lambda s: (-abs(s.a - s.b), s.name))


def _by_name(entries: Iterable[Entry]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.name] += entry.counted
    return counts


def _calls(calls: Iterable[Call]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for call in calls:
        key = f"{call_key(call)} {call.kind}"
        counts, told = _count_by_place(call.counts), bool(call.launch and call.launch.fragment)
        if key in entries:
            counts, told = counts + Counter(entries[key].counts), told or entries[key].told
        counted = sum(counts.values()) if call.kind == "kernel" and call.work else 0
        entries[key] = Entry(call.operator, call_signature(call), counts, counted, told)
    return entries


def _count_by_place(counts: Iterable[Count]) -> Counter[str]:
    by_place: Counter[str] = Counter()
    for count in counts:
        by_place[f"{count.phase} {count.rank} {count.mode}"] += count.count
    return +by_place


def _contents(dataset: Dataset, name: str) -> Counter[bytes]:
    return Counter(map(dataset.content_of, dataset.workloads.get(name, ())))


def _definitions(dataset: Dataset) -> dict[str, Entry]:
    counts: dict[str, Counter[str]] = {name: Counter() for name in dataset.definitions}
    calls = {(line.definition, line.operator, line.call): line for line in dataset.counts}
    for (name, _, _), line in calls.items():
        counts.setdefault(name, Counter()).update(_count_by_place(line.counts))
    return {
        name: Entry(
            name,
            definition.op_type,
            {**counts[name], "workloads": len(dataset.workloads.get(name, ()))},
            counts[name].total(),
        )
        for name, definition in dataset.definitions.items()
    }

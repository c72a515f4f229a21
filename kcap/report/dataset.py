"""The report of a FlashInfer-Bench dataset: its Definitions, and how many Workloads of which sizes each has."""

from __future__ import annotations

from collections import Counter, defaultdict

from kcap.report.calls import CallColumns, CallDetails, DefinitionText
from kcap.report.document import Extras, Report, Words
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import Definition, DefinitionTensor
from kcap.show.dataset import definition_rows

VERIFIED = "status:verified"


def report_of_dataset(dataset: Dataset, name: str, extras: Extras) -> tuple[Report, CallDetails]:
    """A Definition has the counts that `kcap show` lists, and of each axis that varies its sizes by Workload."""
    rows = definition_rows(dataset)
    definitions = [
        {**row.as_json(), "reference": _reference(dataset.definitions[row.name]), "sizes": _sizes(dataset, row.name)}
        for row in rows
    ]
    missing = [f"{row.name}: {row.missing:,} Workloads name a blob that is not there" for row in rows if row.missing]
    words = [Words("Times", ["a dataset holds no times of the engine: kcap replay measures its references"])]
    report = Report(
        kind="dataset",
        source=name,
        identity=name,
        header=["", f"{len(rows):,} Definitions, {sum(row.workloads for row in rows):,} Workloads"],
        steps={},
        total=sum(row.count for row in rows),
        distinct=sum(row.workloads for row in rows),
        gpu_us=0.0,
        estimated_us=0.0,
        coverage=None,
        mix_unit="invocations",
        mix_source="",
        mix_measured=False,
        rates=None,
        calls=CallColumns(),
        histograms=[],
        strips=[],
        words=[*words, *([Words("Workloads", missing)] if missing else [])],
        definitions=definitions,
        against=extras.against,
        judged=extras.judged,
    )
    texts = {definition: _text(dataset.definitions[definition]) for definition in dataset.definitions}
    return report, CallDetails(definitions=texts)


def _reference(definition: Definition) -> str:
    return "verified" if VERIFIED in definition.tags else "not checked"


def _sizes(dataset: Dataset, name: str) -> dict[str, list[tuple[int, int]]]:
    """Of each axis that varies: how many Workloads have which size."""
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for workload in dataset.workloads.get(name, ()):
        for axis, size in workload.axes.items():
            sizes[axis][size] += 1
    return {axis: sorted(counts.items()) for axis, counts in sizes.items()}


def _text(definition: Definition) -> DefinitionText:
    tensors = {"input": definition.inputs, "output": definition.outputs}
    lines = [f"{kind} {_tensor(name, one)}" for kind, named in tensors.items() for name, one in named.items()]
    return DefinitionText(definition.description or "", lines, list(definition.constraints), definition.reference)


def _tensor(name: str, tensor: DefinitionTensor) -> str:
    shape = "scalar" if tensor.shape is None else f"[{', '.join(tensor.shape)}]"
    return f"{name}: {tensor.dtype} {shape}{' (optional)' if tensor.optional else ''}"

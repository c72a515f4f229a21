"""`tritonbench`: one JSON for each operator, for `--input-loader FILE`.

Sources: tritonbench's `operator_loader/aten/input_loader.py`, `operators/gemm/input_loader.py` and its dispatch of
loaders. The aten loader evaluates a key such as `aten.mm.default`, knows a list of aten's operators alone, and its
tensors take no device: an operator that it does not list is written as the one that it ends in (`linear` as `mm`), or
lost. The built-in `gemm` reads shapes and strides; it is written beside `aten.mm.default`, of the same calls.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.lines import Entry, entries, indexes
from kcap.bench.exports.common.tritonbench_operators import listed_line
from kcap.schemas.backendbench import TraceLine, serialize
from kcap.schemas.backendbench.calls import DEVICE_OF_TENSORS
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.recording.values import Opaque, TensorSpec
from kcap.schemas.results.export_loss import FILE, ExportLoss, LossLedger

UNLISTED = "tritonbench's aten loader does not list it, nor an operator that it ends in"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PROBABILITIES = frozenset({"bernoulli", "bernoulli_", "binomial", "multinomial", "poisson"})


@exporter("tritonbench")
class TritonBench(Exporter):
    """`aten.mm.default.json` and its like; `gemm.json` where there are matrix products of two plain matrices."""

    needs = "in a clone of tritonbench"

    def write(self, request: ExportRequest) -> ExportLoss:
        ledger = LossLedger()
        counts: dict[str, Counter[str]] = {}
        gemms: Counter[str] = Counter()
        for entry in entries(request.contents, ledger):
            if (line := _runnable(entry, ledger)) is not None:
                counts.setdefault(line.operator, Counter())[serialize(line.args, line.kwargs)] += line.count
                if (gemm := _gemm(line)) is not None:
                    gemms[f"((), {gemm!r})"] += line.count
        for operator, inputs in counts.items():
            _write(request.output, operator, "aten", inputs)
        if gemms:
            _write(request.output, "gemm", "builtin", gemms)
        return ledger.loss("tritonbench", request.contents.total)

    def following(self, output: Path) -> str:
        files = sorted(path for path in output.glob("*.json") if path.name != FILE)
        if not files:
            return f"cat {shlex.quote(str(output / FILE))}"
        return f"python run.py --op {files[-1].stem} --input-loader {shlex.quote(str(files[-1].resolve()))}"


def _write(folder: Path, key: str, loader: str, counts: Counter[str]) -> None:
    metadata = {"tritonbench_ops": [key], "tritonbench_loader": loader, "source": "kcap"}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    inputs = [{"count": count, "inputs": arguments} for arguments, count in ordered]
    write_json(folder / f"{key}.json", {"metadata": metadata, key: inputs})


def _runnable(entry: Entry, ledger: LossLedger) -> TraceLine | None:
    """The line that tritonbench runs for `entry`; the ledger is told, too, if there is none."""
    line = listed_line(entry.line)
    reason = next(_reasons(entry), None if line is not None else UNLISTED)
    if line is None or reason:
        entry.lose(ledger, reason or UNLISTED)
        return None
    entry.keep(ledger)
    if line.operator != entry.line.operator:
        for converted in entry.converted:
            ledger.reduce(converted.call.operator, f"run as {line.operator}, which it ends in", converted.call.total)
    return line


def _reasons(entry: Entry) -> Iterator[str]:
    """Why tritonbench cannot run it."""
    specs = list(entry.tensors())
    if entry.namespace != "aten":
        yield "tritonbench's aten loader knows operators of aten alone"
    if "embedding" in entry.line.operator:
        yield "tritonbench refuses names that contain embedding"
    if indexes(entry):
        yield "tritonbench draws its integers from -9 to 9: it would index out of bounds"
    if entry.base in PROBABILITIES:
        yield "tritonbench draws its numbers from -9 to 9: they are no probabilities"
    if any(spec.device != DEVICE_OF_TENSORS for spec in specs):
        yield "tritonbench's tensors have one device: the one it runs on"
    if any(0 in (spec.strides or ()) for spec in specs):
        yield "a tensor with a stride of 0: tritonbench does not fill it"
    if any(isinstance(value, Opaque) for value in entry.values()):
        yield "a sparse or random tensor: tritonbench cannot make it"


def _is_product(first: TensorSpec, second: TensorSpec) -> bool:
    return first.shape[1] == second.shape[0] and first.dtype == second.dtype and first.dtype in PRECISIONS


def _gemm(line: TraceLine) -> dict[str, str] | None:
    """The built-in loader's keywords for [M, K] x [K, N], every value a string; None for what is no such product."""
    match line.operator, *line.args[:2]:
        case "aten.mm.default", TensorSpec(shape=(m, k)) as first, TensorSpec(shape=(_, n)) as second:
            if _is_product(first, second):
                strides = [list(first.effective_strides), list(second.effective_strides)]
                sizes = {"M": str(m), "N": str(n), "K": str(k)}
                return {"dtype": PRECISIONS[first.dtype], "strides": str(strides), **sizes}
    return None

"""`tritonbench`: one JSON for each operator, for `--input-loader FILE`.

Sources: tritonbench's `operator_loader/aten/input_loader.py`, `operators/gemm/input_loader.py` and its dispatch of
loaders. The aten loader evaluates a key such as `aten.mm.default`, knows aten alone, and its tensors take no device.
The built-in `gemm` reads shapes and strides; it is written beside `aten.mm.default`, of the same calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.lines import Entry, entries, indexes
from kcap.schemas.backendbench.calls import DEVICE_OF_TENSORS
from kcap.schemas.files.jsonfile import write_json
from kcap.schemas.recording.values import Opaque, TensorSpec
from kcap.schemas.results.export_loss import ExportLoss, LossLedger

GEMMS = frozenset({"aten.mm.default", "aten.mm.out"})
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PROBABILITIES = frozenset({"bernoulli", "bernoulli_", "binomial", "multinomial", "poisson"})


@exporter("tritonbench")
class TritonBench(Exporter):
    """`aten.mm.default.json` and its like; `gemm.json` where there are matrix products of two plain matrices."""

    def write(self, request: ExportRequest) -> ExportLoss:
        ledger = LossLedger()
        kept = [entry for entry in entries(request.contents, ledger) if _kept(entry, ledger)]
        for operator, group in groupby(kept, key=lambda entry: entry.line.operator):
            _write(request.output, operator, "aten", [_input(entry.line.count, entry.args) for entry in group])
        if gemms := list(_gemms(kept)):
            _write(request.output, "gemm", "builtin", gemms)
        return ledger.loss("tritonbench", request.contents.total)

    def following(self, output: Path) -> str:
        files = sorted(path for path in output.glob("*.json") if path.stem.startswith(("aten.", "gemm")))
        first = files[-1] if files else output / "gemm.json"
        return f"python run.py --op {first.stem} --input-loader {first}"


def _write(folder: Path, key: str, loader: str, inputs: list[dict[str, Any]]) -> None:
    metadata = {"tritonbench_ops": [key], "tritonbench_loader": loader, "source": "kcap"}
    write_json(folder / f"{key}.json", {"metadata": metadata, key: inputs})


def _input(count: int, arguments: str) -> dict[str, Any]:
    return {"count": count, "inputs": arguments}


def _kept(entry: Entry, ledger: LossLedger) -> bool:
    reason = next(_reasons(entry), None)
    if reason:
        entry.lose(ledger, reason)
    else:
        entry.keep(ledger)
    return reason is None


def _reasons(entry: Entry) -> Iterator[str]:
    """Why tritonbench cannot run it."""
    specs = list(entry.tensors())
    if entry.namespace != "aten":
        yield "tritonbench's aten loader knows operators of aten alone"
    if "embedding" in entry.line.operator:
        yield "tritonbench refuses names that contain embedding"
    if indexes(entry) or _looks_up(entry):
        yield "tritonbench draws its integers from -9 to 9: it would index out of bounds"
    if entry.base in PROBABILITIES:
        yield "tritonbench draws its numbers from -9 to 9: they are no probabilities"
    if any(spec.device != DEVICE_OF_TENSORS for spec in specs):
        yield "tritonbench's tensors have one device: the one it runs on"
    if any(0 in (spec.strides or ()) for spec in specs):
        yield "a tensor with a stride of 0: tritonbench does not fill it"
    if any(isinstance(value, Opaque) for value in entry.values()):
        yield "a sparse or random tensor: tritonbench cannot make it"


def _looks_up(entry: Entry) -> bool:
    """BackendBench passes over these operators itself; tritonbench does not."""
    wide = any(spec.dtype in ("int32", "int64") for spec in entry.tensors())
    return wide and any(word in entry.base for word in ("index", "gather", "scatter", "nll_loss"))


def _gemms(kept: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    for entry in kept:
        match entry.line.operator in GEMMS, *entry.line.args[:2]:
            case True, TensorSpec(shape=(_, _)) as first, TensorSpec(shape=(_, _)) as second:
                if _is_product(first, second):
                    yield _input(entry.line.count, f"((), {_gemm(first, second)!r})")


def _is_product(first: TensorSpec, second: TensorSpec) -> bool:
    return first.shape[1] == second.shape[0] and first.dtype == second.dtype and first.dtype in PRECISIONS


def _gemm(first: TensorSpec, second: TensorSpec) -> dict[str, str]:
    """The built-in loader's keywords for [M, K] x [K, N], every value a string."""
    (m, k), n = first.shape, second.shape[1]
    strides = [list(first.effective_strides), list(second.effective_strides)]
    sizes = {"M": str(m), "N": str(n), "K": str(k)}
    return {"dtype": PRECISIONS[first.dtype], "strides": str(strides), **sizes}

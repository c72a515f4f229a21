"""`backendbench`: a trace file, and the parquet that drives BackendBench's suite, with the times of `kcap replay`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kcap.bench.contents import Contents
from kcap.bench.exports import Exporter, ExportRequest, exporter
from kcap.bench.exports.common.lines import Entry, entries, indexes
from kcap.errors import CallError
from kcap.schemas.backendbench.table import TableRow, write_table
from kcap.schemas.recording.signature import call_key
from kcap.schemas.recording.values import Opaque
from kcap.schemas.results import measurement
from kcap.schemas.results.export_loss import ExportLoss, LossLedger
from kcap.schemas.results.measurement import Measurement

# Of its `op_categories.py`: it passes over an operator in whose name an entry occurs anywhere. Some commas are missing
# there, which joins two entries to one that no name has: `outclone.default` for `clone.default`.
UNSUPPORTED = tuple(
    "embedding.default embedding.out scatter.src scatter.reduce scatter.value gather.out gather.dimname "
    "im2col_backward. col2im_backward. native_layer_norm_backward. upsample_nearest2d_backward.default "
    "upsample_nearest2d_backward.grad_input upsample_bilinear2d_backward.default "
    "upsample_bilinear2d_backward.grad_input _cudnn_rnn_backward. _cudnn_rnn. _fft_c2c.".split()
)
RANDOM_NAMES = ("bernoulli.default", "bernoulli.out", "bernoulli.Tensor")
CREATION = tuple(
    "cat.default cat.out cat.names clone.out copy_.default elu_backward. new_empty. new_empty_strided. new_full. "
    "new_ones. new_zeros. nonzero.default nonzero.out repeat.default repeat.out split.Tensor split_with_sizes.default "
    "unsqueeze_.default".split()
)
MISSING_COMMA = frozenset(
    "clone.default masked_fill_.Scalar masked_fill_.Tensor gather.default index.Tensor nll_loss.default".split()
)

RANDOM = frozenset(
    "bernoulli bernoulli_ dropout native_dropout exponential_ geometric_ log_normal_ multinomial normal normal_ "
    "poisson rand rand_like randint randint_like randn randn_like random_ randperm rrelu_with_noise uniform_".split()
)

REGISTERED = frozenset({"aten", "prims"})  # what torch alone registers
NO_RANDOM = "BackendBench does not support correctness testing for random ops yet"
NO_CREATION = "BackendBench does not support correctness testing for tensor creation and manipulation ops yet"
MEANT = "BackendBench means to leave it out, though commas missing in its list let it through"
DRAWS = "it draws random numbers: BackendBench compares with another draw"
SYNTHETIC = "Synthetic ops are not supported in the official benchmark yet"


@exporter("backendbench")
class BackendBench(Exporter):
    """trace.txt and trace.parquet, of the same lines in the same order."""

    takes_times = True
    needs = "with BackendBench installed"

    def write(self, request: ExportRequest) -> ExportLoss:
        ledger = LossLedger()
        lines = entries(request.contents, ledger)
        times = read_times(request.measurements, request.contents) if request.measurements else {}
        with (request.output / "trace.txt").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(_texts(lines))
        write_table(request.output / "trace.parquet", (_row(entry, times, ledger) for entry in lines))
        return ledger.loss("backendbench", request.contents.total)

    def following(self, output: Path) -> str:
        suite = "python -m BackendBench.scripts.main --suite torchbench --backend aten"
        return f"{suite} --alternative-torchbench-data-path {shlex.quote(str(output / 'trace.parquet'))} --log-dir out"


def _texts(lines: list[Entry]) -> Iterator[str]:
    operator = None
    for entry in lines:
        if entry.line.operator != operator:
            operator = entry.line.operator
            yield f"Operator: {operator}\n"
        yield entry.text()


def _row(entry: Entry, times: Mapping[str, CallTimes], ledger: LossLedger) -> TableRow:
    """The row of `entry`; the ledger is told whether BackendBench runs it."""
    measured = [
        (converted.call.total, times_of_call)
        for converted in entry.converted
        if times and (times_of_call := times.get(call_key(converted.call)))
    ]
    failed = [f"Failed to run: {times_of_call.failed}" for _, times_of_call in measured if times_of_call.failed][:1]
    unrunnable = failed or list(_unrunnable(entry))
    excluded = unrunnable + list(_untestable(entry))
    if excluded:
        entry.lose(ledger, excluded[0])
    else:
        entry.keep(ledger)
    runtime = _mean([(count, times_of_call.runtime_us) for count, times_of_call in measured])
    return TableRow(
        entry.line.operator,
        entry.args,
        entry.line.count,
        excluded,
        not unrunnable,
        None if runtime is None else runtime / 1000,
        _mean([(count, times_of_call.relative) for count, times_of_call in measured]),
    )


def _mean(weighted: list[tuple[int, float | None]]) -> float | None:
    present = [(count, value) for count, value in weighted if value is not None]
    return fmean([value for _, value in present], [count or 1 for count, _ in present]) if present else None


def _unrunnable(entry: Entry) -> Iterator[str]:
    """Why BackendBench cannot run it, or dies of it."""
    operator = entry.line.operator
    if entry.namespace not in REGISTERED:
        yield f"torch alone does not register {entry.namespace}: BackendBench's run would end at it"
    if skipped := next((word for word in UNSUPPORTED if word in operator), None):
        yield f"BackendBench passes over names that contain {skipped}"
    if entry.line.count == 0:
        yield SYNTHETIC
    if indexes(entry):
        yield "BackendBench draws its integers from -9 to 9: it would index out of bounds"
    if any(spec.numel == 0 and spec.strides is not None for spec in entry.tensors()):
        yield "a strided tensor of no elements: BackendBench's run would end at it"
    if any(isinstance(value, Opaque) and value.type.startswith("ST(") for value in entry.values()):
        yield "a sparse tensor: BackendBench's run would end at it"


def _untestable(entry: Entry) -> Iterator[str]:
    """Why BackendBench cannot judge it."""
    name = entry.line.operator.split(".", 1)[1]
    if any(word in name for word in RANDOM_NAMES):
        yield NO_RANDOM
    elif entry.base in RANDOM:
        yield DRAWS
    if any(word in name for word in CREATION):
        yield NO_CREATION
    if name in MISSING_COMMA:
        yield MEANT


@dataclass(frozen=True)
class CallTimes:
    """A Call's time: the mean over its Samples' medians. `relative`: over the time of a kernel that does next to
    nothing, by the same method, on a GPU only. `failed`: why no Sample could run."""

    runtime_us: float | None
    relative: float | None
    failed: str | None


def read_times(path: Path, contents: Contents) -> dict[str, CallTimes]:
    """Times by `call_key`; CallError if none in `path` is of a Call in `contents`."""
    by_key: dict[str, list[Measurement]] = {}
    for line in measurement.read_measurements(path):
        by_key.setdefault(line.key, []).append(line)
    if not any(call_key(call) in by_key for call in contents.kernels):
        raise CallError(f"{path}: measures no call of {contents.path} (kcap replay {contents.path} -o {path})")
    return {key: _call_times(lines) for key, lines in by_key.items()}


def _call_times(lines: Iterable[Measurement]) -> CallTimes:
    timed = [line for line in lines if line.status == "ok" and line.median_us is not None]
    failed = next((line.reason or "failed" for line in lines if line.status == "failed"), None)
    if not timed:
        return CallTimes(None, None, failed)
    runtime = fmean(line.median_us or 0.0 for line in timed)
    floors = [line.floor_us for line in timed if line.floor_us and line.device.startswith("cuda")]
    return CallTimes(runtime, runtime / fmean(floors) if floors else None, None)

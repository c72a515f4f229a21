"""What runs in a candidate's process: the code from elsewhere is built there, and then called by the driver."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from kcap.bench import build
from kcap.bench.judge.driver import driver, gpu, protocol
from kcap.bench.judge.messages import BuildReport
from kcap.replay.datasets.reference import argument_order, compile_reference
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer import solution as solutions_file

MOST_LOG = 4000  # characters of a compiler's output that are sent on


@dataclass(frozen=True)
class CandidateOrder:
    """What a candidate runs: `solution`, a Solution's JSON, or else the reference of `definition`, also JSON.

    `threads`: of torch's pool on the CPU.
    """

    folder: str
    device: str
    threads: int
    solution: str | None = None
    definition: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CandidateOrder:
        return cls(**fields)


def run_candidate(order: CandidateOrder, channel: int, report: int, loaded: driver.Driver) -> None:
    """Build, say in the memory `report` how that went, and serve the judge; this process ends with it."""
    os.environ.update(build.environment(Path(order.folder)))
    torch.set_num_threads(order.threads)
    try:
        if order.device != "cpu":
            _use_gpu(order.device, loaded)
        callable_ = _build_callable(order)
    except build.BuildFailed as failure:
        _write(report, {"failed": failure.reason[-MOST_LOG:], "log": failure.log[-MOST_LOG:]})
        return
    _write(report, {"built": True})
    with torch.no_grad():
        loaded.serve(channel, report, callable_)


def _write(memory: int, report: BuildReport) -> None:
    os.pwrite(memory, orjson.dumps(report)[: protocol.REPORT_BYTES - 1] + b"\0", 0)


def _use_gpu(device: str, loaded: driver.Driver) -> None:
    try:
        loaded.use_gpu(*gpu.gpu_handles(device, loaded.path))
    except (RuntimeError, AttributeError, OSError, AssertionError) as error:
        raise build.BuildFailed(f"its process cannot use {device}: {error}", "") from None


def _build_callable(order: CandidateOrder) -> Callable[..., Any]:
    if order.solution is not None:
        return build.build(solutions_file.from_bytes(order.solution.encode()), Path(order.folder))
    assert order.definition is not None
    definition = definitions_file.from_bytes(order.definition.encode())
    try:
        reference = compile_reference(definition.reference, definition.name)
    except Exception as error:
        raise build.BuildFailed(f"{type(error).__name__}: {error}", "") from None
    indices = [list(definition.inputs).index(name) for name in argument_order(definition)]
    if indices == sorted(indices):
        return reference
    return lambda *inputs: reference(*(inputs[index] for index in indices))

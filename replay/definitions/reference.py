"""Run a Definition's reference on a Workload, in a process of its own for each: it is code from elsewhere.

A worker (kcap.replay.definitions.reference_worker) forks for each reference, so that one that crashes, hangs, fills the
memory or leaves something behind costs its own result alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kcap.replay.definitions.outputs import Output
from kcap.replay.pool import Worker
from kcap.schemas import definition as definitions_file
from kcap.schemas.definition import Definition
from kcap.schemas.records import Record
from kcap.schemas.workload import Workload

MODULE = "kcap.replay.definitions.reference_worker"


class ReferenceResult(Record):
    """What came of one reference. `skipped`: it cannot run here; `failed`: the Definition or its dataset is at fault.

    `axes`: the sizes that it ran on; `seconds`: its own time, the making of its inputs apart; `notes`: what is not as
    the Workload or the Definition has it.
    """

    status: Literal["ok", "skipped", "failed"]
    reason: str | None = None
    axes: dict[str, int] = {}
    outputs: list[Output] = []
    seconds: float | None = None
    notes: list[str] = []


class References:
    """Runs references on `device`, one after another. `root`: the dataset that blobs are read from.

    `limit`: bytes that inputs and outputs may take, and `memory`: bytes that the process may (None: what is free).
    """

    def __init__(
        self,
        root: Path | None,
        device: str = "cpu",
        limit: int | None = None,
        memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        path = str(root) if root is not None else None
        session = {"root": path, "device": device, "limit": limit, "memory": memory, "threads": threads}
        self.worker = Worker(session, MODULE)

    def __enter__(self) -> References:
        self.worker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.__exit__()

    def run(self, definition: Definition, workload: Workload, timeout: float, seed: int = 0) -> ReferenceResult:
        """What came of the reference on `workload`; `timeout`: seconds for it and the making of its inputs."""
        request = {
            "definition": definitions_file.to_bytes(definition).decode(),
            "workload": workload.model_dump(mode="json"),
            "seed": seed,
        }
        return ReferenceResult.model_validate(self.worker.run(request, timeout))

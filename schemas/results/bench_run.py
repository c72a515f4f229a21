"""bench.json, in the folder that `kcap bench` writes: what was judged on what, where, and with which options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

RUN_FILE = "bench.json"


class SolutionFile(BaseModel):
    """The file of a Solution, and the SHA-256 of the Solution as it was judged."""

    model_config = ConfigDict(frozen=True)

    file: str
    sha256: str


class RefusedFile(BaseModel):
    """A file that is no Solution for what is judged."""

    model_config = ConfigDict(frozen=True)

    file: str
    reason: str


class Machine(BaseModel):
    """What the judges say that they ran on. Empty until the first has started."""

    model_config = ConfigDict(frozen=True)

    devices: list[str] = []
    torch: str = ""
    driver: str | None = None


class RunRecord(BaseModel):
    """`identity`: the SHA-256 of what PATH holds; `blobs`, by Definition, of the files that its Workloads name.

    `solutions` are keyed `definition/author/name`.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["1.0"] = "1.0"
    kcap: str
    path: str
    identity: str
    blobs: Mapping[str, str] = {}
    device: str
    threads: int | None = None
    options: Mapping[str, Any] = {}
    machine: Machine = Machine()
    solutions: Mapping[str, SolutionFile] = {}
    refused: Sequence[RefusedFile] = []

    def after(self, before: RunRecord) -> RunRecord:
        """This run, that adds to what `before` judged."""
        solutions, blobs = {**before.solutions, **self.solutions}, {**before.blobs, **self.blobs}
        return self.model_copy(update={"machine": before.machine, "solutions": solutions, "blobs": blobs})

    def joined(self, environment: Mapping[str, Any]) -> RunRecord:
        """This run with a judge that says this of its machine."""
        name = str(environment.get("device_name") or environment.get("device"))
        torch, driver = str(environment.get("torch") or ""), environment.get("driver")
        machine = Machine(devices=sorted({*self.machine.devices, name}), torch=torch, driver=driver)
        return self.model_copy(update={"machine": machine})


RUN_ADAPTER = TypeAdapter(RunRecord)

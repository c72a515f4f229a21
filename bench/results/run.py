"""bench.json: what was judged on what, by which an output is known again when it is resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from kcap.errors import CallError
from kcap.schemas.jsonfile import dump_json, read_json

FILE = "bench.json"
LIMITS = ("timeout", "build_timeout")  # options of time


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


class Run(BaseModel):
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

    def after(self, before: Run) -> Run:
        """This run, that adds to what `before` judged."""
        solutions, blobs = {**before.solutions, **self.solutions}, {**before.blobs, **self.blobs}
        return self.model_copy(update={"machine": before.machine, "solutions": solutions, "blobs": blobs})

    def joined(self, environment: Mapping[str, Any]) -> Run:
        """This run with a judge that says this of its machine."""
        name = str(environment.get("device_name") or environment.get("device"))
        torch, driver = str(environment.get("torch") or ""), environment.get("driver")
        machine = Machine(devices=sorted({*self.machine.devices, name}), torch=torch, driver=driver)
        return self.model_copy(update={"machine": machine})


ADAPTER = TypeAdapter(Run)


def read(output: Path) -> Run:
    """The run that `output` holds; FormatError if its bench.json is none."""
    return read_json(output / FILE, ADAPTER)


def write(output: Path, run: Run) -> None:
    """Put bench.json in place at once."""
    beside = output / f".{FILE}"
    beside.write_bytes(dump_json(run.model_dump(mode="json")))
    os.replace(beside, output / FILE)


def check_same(output: Path, before: Run, now: Run) -> None:
    """CallError naming both where `now` would add Outcomes to `output` that cannot stand beside those of `before`."""
    if before.identity != now.identity:
        raise CallError(f"{output}: holds Outcomes on {_of(before)}, and this is {_of(now)}: choose another -o")
    for name in sorted(before.blobs.keys() & now.blobs.keys()):
        if before.blobs[name] != now.blobs[name]:
            raise CallError(f"{output}: holds Outcomes on other blobs of {name} than there are now: choose another -o")
    for what in ("device", "kcap", "threads"):
        _refuse(output, what, getattr(before, what), getattr(now, what))
    seconds = before.options.get("seconds")
    _refuse(output, "--seconds", seconds, now.options.get("seconds"), f"pass --seconds {seconds}, or choose another -o")


def longer(before: Run, now: Run) -> bool:
    """Whether a Solution gets more time than it did in `before`."""
    return any(now.options[name] > before.options[name] for name in LIMITS if name in before.options)


def check_machine(output: Path, before: Machine, now: Machine) -> None:
    """The same for the machine, where one is known already."""
    if not before.devices:
        return
    _refuse(output, "torch", before.torch, now.torch)
    if new := sorted(set(now.devices) - set(before.devices)):
        _refuse(output, "device", ", ".join(before.devices), ", ".join(new))


def _of(run: Run) -> str:
    return f"{run.path} (sha256 {run.identity[:12]})"


def _refuse(output: Path, what: str, before: Any, now: Any, fix: str = "choose another -o") -> None:
    if before != now:
        raise CallError(f"{output}: was judged with {what} {before}, and this is {now}: {fix}")

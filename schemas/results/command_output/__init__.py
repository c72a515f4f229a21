"""What the commands print with `--json`, beside those that print a format of its own (OWN).

A member stays, under its name and with its meaning, for a major version of kcap; a minor one may bring others. Times
(`_us`) are microseconds; None: not known.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import TypeAdapter

from kcap.schemas.results.command_output.recordings import (
    CallsDiffOutput,
    DefinitionsOutput,
    FamiliesDiffOutput,
    GainOutput,
    KernelsOutput,
    RequestsOutput,
    TurnsOutput,
)
from kcap.schemas.results.command_output.runs import (
    BenchOutput,
    DoctorOutput,
    FidelityOutput,
    ProgramsOutput,
    ReplayOutput,
    ValidatedOutput,
)

OWN = {"apply": "plan", "ab": "applied", "judge": "verdict"}  # command: the format that it prints
ShowOutput: TypeAlias = KernelsOutput | RequestsOutput | DefinitionsOutput | TurnsOutput
DiffOutput: TypeAlias = CallsDiffOutput | FamiliesDiffOutput
OUTPUTS: dict[str, TypeAdapter[Any]] = {  # by command
    "show": TypeAdapter(ShowOutput),
    "gain": TypeAdapter(GainOutput),
    "diff": TypeAdapter(DiffOutput),
    "replay": TypeAdapter(ReplayOutput | ProgramsOutput | FidelityOutput),
    "bench": TypeAdapter(BenchOutput),
    "validate": TypeAdapter(list[ValidatedOutput]),
    "doctor": TypeAdapter(DoctorOutput),
}


def format_of_output(command: str) -> str:
    """The name of the schema of what `command --json` prints."""
    return OWN.get(command, f"{command}-output")

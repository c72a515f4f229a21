"""What `kcap replay`, `bench`, `validate` and `doctor` print of what they ran or looked at."""

from __future__ import annotations

from typing import Any, Literal

from kcap.schemas.results.command_output.output import Output
from kcap.schemas.results.measurement import ProgramMeasurement


class EnvironmentOutput(Output):
    """What was replayed on; `error`: why there is no device."""

    device: str | None = None
    device_name: str | None = None
    driver: str | None = None
    threads: int | None = None
    torch: str | None = None
    error: str | None = None


class Part(Output):
    """Calls and their count, and its share of all counts."""

    calls: int
    count: int
    share: float


class Reason(Output):
    """Why Calls were left out."""

    reason: str
    calls: int
    count: int


class PartWithReasons(Part):
    """Calls that have no time."""

    reasons: list[Reason]


class ReplayedOutput(Output):
    """A Call, or a dataset's Workload. What begins with `bytes` is there where a floor is known."""

    call: int | None = None
    operator: str | None = None
    signature: str | None = None
    definition: str | None = None
    workload: str | None = None
    axes: dict[str, int] | None = None
    count: int
    phases: dict[str, int]
    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    time_us: float | None
    total_us: float | None
    method: str | None
    cache: str | None
    samples: int
    bytes: int | None = None
    flops: int | None = None
    roofline_us: float | None = None
    times_floor: float | None = None
    gb_s: float | None = None
    tflop_s: float | None = None
    notes: list[str]


class ReplaySeconds(Output):
    """How long it took."""

    start: float
    replay: float


class ReplayOutput(Output):
    """`kcap replay`; `bad_lines`: of a trace file, those that are none."""

    path: str
    environment: EnvironmentOutput
    ceilings: list[dict[str, Any]]
    seconds: ReplaySeconds
    bad_lines: int
    replayed: Part
    skipped: PartWithReasons
    failed: PartWithReasons
    gpu_time_us: float
    host_time_us: float
    calls: list[ReplayedOutput]


class ProgramsOutput(Output):
    """`kcap replay --program`."""

    path: str
    environment: EnvironmentOutput
    programs: list[ProgramMeasurement]


class FidelityOutput(Output):
    """`kcap replay --compare-engine`, of all profiled steps; `kinds`: the same of each kind of step."""

    path: str
    recorded_on: str | None
    environment: EnvironmentOutput
    holds: bool
    bounds: dict[str, float]
    engine_us: float
    replayed_us: float
    missing_us: float
    error: float | None
    total_by: dict[str, int]
    kinds: list[dict[str, Any]]


class SavingOutput(Output):
    """What the kernels of a phase took and would take with Solutions, and the saving's share of the whole."""

    before_us: float
    after_us: float
    total_us: float | None
    saved_us: float
    share: float | None


class ScoreOutput(Output):
    """A Solution. `geometric_mean`: of its speedups by Workload, `weighted`: by count; null unless ranked."""

    definition: str
    author: str
    solution: str
    workloads: int
    judged: int
    passed: int
    statuses: dict[str, int]
    ranked: bool
    geometric_mean: float | None
    weighted: float | None
    spread: float | None
    worst: str | None
    saves: dict[str, SavingOutput]


class JudgingMachine(Output):
    """What the judges ran on."""

    devices: list[str]
    torch: str
    driver: str | None


class RefusedOutput(Output):
    """A file that is no Solution for what is judged."""

    file: str
    reason: str


class BenchOutput(Output):
    """`kcap bench`. `best`: of each Definition, as `definition/solution`; `saves`: of these together."""

    path: str
    output: str
    machine: JudgingMachine
    baseline: str
    solutions: list[ScoreOutput]
    best: list[str]
    saves: dict[str, SavingOutput]
    refused: list[RefusedOutput]
    notes: list[str]
    processors_in_use: list[float | None]


class ProblemOutput(Output):
    """`place`: `path`, `path:line` or `path:line:column`."""

    place: str
    reason: str
    severity: Literal["error", "warning"]


class ValidatedOutput(Output):
    """A path and what is wrong with it. `format` null: no format that kcap knows."""

    path: str
    format: str | None
    valid: bool
    problems: list[ProblemOutput]


class CheckOutput(Output):
    """One thing looked for; `fix`: the command that would mend it."""

    name: str
    state: Literal["ok", "missing", "problem"]
    found: str
    fix: str


class DoctorOutput(Output):
    """`kcap doctor`."""

    machine: list[CheckOutput]
    works: list[CheckOutput]

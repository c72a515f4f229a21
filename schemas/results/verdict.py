"""What `kcap judge` says of one Solution of a task: a JSON object, enough to know what to do next.

Times are microseconds of one invocation; gains are sums over what the engine ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter

from kcap.schemas.results.measurement import Cache, Method, Time
from kcap.schemas.results.outcome import Accuracy, Status, WrongElements

LimitedBy = Literal["memory", "compute", "launch"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CompilerMessage(_Part):
    """One message of a compiler, or the place in the Solution where Python raised. `line` and `column` count from 1."""

    file: str
    line: int
    column: int | None = None
    severity: Literal["error", "warning", "note"] = "error"
    text: str


class Spread(_Part):
    """A time: its median and quartiles over `samples` samples of the clock."""

    median_us: Time
    q1_us: Time
    q3_us: Time
    samples: int = 0
    method: Method | None = None
    cache: Cache | None = None


class WorkloadVerdict(_Part):
    """One Workload. `count`: how often the engine ran it, `share` of the task's invocations.

    `time` is of the Solution, `reference` of the Definition's reference, both by one clock; `engine_us` of the engine's
    own kernel, as `kcap replay` measured it. `floor_us`: what this machine cannot go below; `times_floor`: the time
    over it. `speedup`: the engine's time over the Solution's, or the reference's where the engine's is not known.
    `limited_by`: what bounds a kernel at this size; `gb_s` and `tflop_s`: what the Solution reaches, of the bytes and
    FLOPs that no kernel can do without.
    """

    workload: str
    axes: Mapping[str, int] = {}
    status: Status
    reason: str | None = None
    count: int | None = None
    share: FiniteFloat = 0.0
    time: Spread | None = None
    reference: Spread | None = None
    engine_us: Time | None = None
    floor_us: Time | None = None
    times_floor: FiniteFloat | None = None
    speedup: FiniteFloat | None = None
    limited_by: LimitedBy | None = None
    gb_s: FiniteFloat | None = None
    tflop_s: FiniteFloat | None = None
    accuracy: Accuracy | None = None
    wrong: Sequence[WrongElements] = []
    notes: Sequence[str] = []
    seconds: FiniteFloat = 0.0


class Gain(_Part):
    """What the Solution saves of the baseline's time on the Workloads that passed.

    `speedup`: `before_us` over `after_us`. `total_us`: of all that was measured; `share`: what of it is saved.
    """

    before_us: Time
    after_us: Time
    saved_us: FiniteFloat
    speedup: FiniteFloat | None = None
    total_us: Time | None = None
    share: FiniteFloat | None = None


class HeldOutVerdict(_Part):
    """Of the Workloads that the folder does not have: sums alone, so that nothing is learnt of them one by one."""

    workloads: int
    judged: int = 0
    passed: int = 0
    statuses: Mapping[str, int] = {}
    speedup: FiniteFloat | None = None
    note: str | None = None


class Verdict(_Part):
    """`status`: PASSED where every Workload that was judged passed, else the gravest of all; `reason` is of that one.

    `complete`: every Workload was judged, the held-out ones too. `baseline`: what `gain` is measured against, by phase
    and over all. `log`: the end of what the Solution, or its compiler, printed. `next`: what follows from the above.
    """

    format: Literal["1.0"] = "1.0"
    kcap: str = ""
    definition: str
    solution: str
    author: str = ""
    file: str = ""
    status: Status
    reason: str | None = None
    complete: bool = False
    quick: bool = False
    compiler: Sequence[CompilerMessage] = []
    log: str = ""
    workloads: Sequence[WorkloadVerdict] = []
    baseline: str = ""
    gain: Mapping[str, Gain] = {}
    held_out: HeldOutVerdict | None = None
    next: Sequence[str] = []
    notes: Sequence[str] = []
    profile: Mapping[str, Any] | None = None
    device: str = ""
    device_name: str = ""
    threads: int | None = None
    torch: str = ""
    driver: str | None = None
    first_seconds: FiniteFloat | None = None
    seconds: FiniteFloat = 0.0


VERDICT_ADAPTER = TypeAdapter(Verdict)

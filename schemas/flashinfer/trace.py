"""FlashInfer-Bench's Trace: a Definition, a Workload of it, and how a Solution fared; one JSON object a line.

A Trace without Solution and Evaluation is a Workload's line. Source: FlashInfer-Bench 0.1.2, `data/trace.py`.
Errors that are not finite are written as its code writes them: the strings NaN, Infinity and -Infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from kcap.schemas.files.jsonfile import read_lines
from kcap.schemas.files.strict_model import StrictModel, Text
from kcap.schemas.flashinfer.definition import Workload

EvaluationStatus: TypeAlias = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
]
STATUSES: tuple[EvaluationStatus, ...] = get_args(EvaluationStatus)
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _from_word(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _to_word(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("must not be negative")
    return value


ErrorField = Annotated[
    float,
    BeforeValidator(_from_word),
    AfterValidator(_not_negative),
    PlainSerializer(_to_word, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"enum": ["NaN", "Infinity"]}]}),
]
Measured = Annotated[FiniteFloat, Field(ge=0)]


class Correctness(StrictModel):
    """The largest errors of all outputs against the reference."""

    max_relative_error: ErrorField = 0.0
    max_absolute_error: ErrorField = 0.0
    extra: dict[str, Any] | None = None


class Performance(StrictModel):
    """Latencies in milliseconds; `speedup_factor` is the reference's over the Solution's."""

    latency_ms: Measured = 0.0
    reference_latency_ms: Measured = 0.0
    speedup_factor: Measured = 0.0


class Environment(StrictModel):
    """The device by name, and the versions of the libraries."""

    hardware: Text
    libs: dict[str, str] = {}


class Evaluation(StrictModel):
    """What came of one run: correctness with PASSED and INCORRECT_NUMERICAL only, performance with PASSED only."""

    status: EvaluationStatus
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @model_validator(mode="after")
    def _status_tells_what_is_measured(self) -> Evaluation:
        for field, statuses in _MEASURED_WITH.items():
            present, needed = getattr(self, field) is not None, self.status in statuses
            if present != needed:
                raise ValueError(f"{field} must {'be there' if needed else 'not be there'} with {self.status}")
        return self


_MEASURED_WITH = {"correctness": ("PASSED", "INCORRECT_NUMERICAL"), "performance": ("PASSED",)}


class Trace(StrictModel):
    """One line. `solution` and `evaluation` None: a Workload's."""

    written: ClassVar[frozenset[str]] = frozenset({"solution", "evaluation"})

    definition: Text
    solution: str | None = None
    workload: Workload
    evaluation: Evaluation | None = None

    @property
    def is_workload(self) -> bool:
        return self.solution is None and self.evaluation is None

    def line(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json")) + b"\n"


def read(path: Path) -> Iterator[Trace]:
    """The Traces in `path`; FormatError names the line that is none."""
    return read_lines(path, Trace)


def write(path: Path, traces: Iterable[Trace]) -> None:
    """Write `traces` to `path`, one JSON object a line."""
    with path.open("wb") as file:
        file.writelines(trace.line() for trace in traces)

"""What `scripts/gpu/repeatability.py` makes of several runs' measurements."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kcap.schemas.measurement import Measurement

SCRIPTS = Path(__file__).parents[1] / "scripts" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "repeatability", raising=False)
    return importlib.import_module("repeatability")


def one(call: int, us: float, method: str = "graph", sample: int | None = None) -> Measurement:
    return Measurement.model_validate(
        {"call": call, "operator": "aten::mm", "median_us": us, "method": method, "cache": "serving", "sample": sample}
    )


def runs(*medians: float, **more: Any) -> list[list[Measurement]]:
    return [[one(0, us, **more)] for us in medians]


@pytest.mark.parametrize(
    ("medians", "name", "holds"),
    [
        ((10.0, 10.0, 10.09), "over 5 µs", True),
        ((10.0, 10.0, 10.11), "over 5 µs", False),
        ((3.0, 3.0, 3.08), "2 to 5 µs", True),
        ((3.0, 3.0, 3.1), "2 to 5 µs", False),
        ((1.0, 1.0, 1.9), "under 2 µs", True),
    ],
)
def test_each_class_has_its_bound(script: Any, medians: tuple[float, ...], name: str, holds: bool) -> None:
    (found,) = script.kernels(runs(*medians))
    assert (found.of.name, found.holds) == (name, holds)
    lines = script.table([found], [10.0])
    assert lines[0].startswith("ok " if holds else "BAD")


def test_samples_are_kernels_of_their_own_and_what_a_run_lacks_is_left_out(script: Any) -> None:
    first = [one(0, 9.0, sample=1), one(0, 90.0, sample=2), one(7, 5.0)]
    found = script.kernels([first, first[:2]])
    assert [(kernel.us, kernel.spread) for kernel in found] == [(9.0, 0.0), (90.0, 0.0)]


def test_the_hosts_times_are_none_of_the_gpus(script: Any) -> None:
    assert script.kernels(runs(9.0, 9.0, method="host")) == []


def test_a_run_of_more_than_a_minute_is_told(script: Any) -> None:
    found = script.kernels(runs(9.0, 9.0))
    assert script.table(found, [59.0, 60.0])[-1].startswith("ok ")
    assert script.table(found, [59.0, 61.0])[-1].startswith("BAD")


def test_what_is_out_of_its_bound_comes_first(script: Any) -> None:
    small, large = script.kernels([[one(0, 1.0), one(1, 9.0)], [one(0, 1.5), one(1, 9.2)]])
    assert script.worst([small, large])[0].endswith("(call 1, sample None)")

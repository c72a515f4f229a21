"""Honest Solutions pass, with a time, whatever honest habits they have."""

from __future__ import annotations

import pytest
from cheat_catalogue import Entry, entries
from judging import Bench, told

pytestmark = pytest.mark.alone

HONEST, ON_GPU = entries("honest"), entries("honest/gpu")


def test_there_are_honest_solutions_of_every_habit():
    assert len(HONEST) >= 12 and len(ON_GPU) >= 4


@pytest.mark.parametrize("entry", HONEST, ids=lambda entry: entry.name)
def test_honest_solution_passes(benches: dict[str, Bench], entry: Entry):
    passes(benches["patient" if "patient" in entry.header else "cpu"], entry)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [*ON_GPU, *HONEST], ids=lambda entry: entry.name)
def test_honest_solution_passes_on_a_gpu(benches: dict[str, Bench], entry: Entry):
    if entry.header.get("devices") == "cpu":
        pytest.skip("it works on the CPU's memory")
    passes(benches["patient_cuda"], entry)


def passes(bench: Bench, entry: Entry) -> None:
    for outcome in bench.judge(entry):
        assert outcome.status == "PASSED", told(outcome)
        assert outcome.time is not None and outcome.time.median_us > 0 and outcome.reference is not None
        assert outcome.accuracy is not None and outcome.accuracy.compared > 0 and outcome.accuracy.error <= 1

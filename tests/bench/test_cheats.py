"""Executable cheats, after those that fooled published kernel evaluators: none passes, and the reason says why."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest
from cheat_catalogue import DATASET, Entry, entries
from judging import Bench, told

from kcap.bench.judge.verdict import CONSTANT
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.results.outcome import STATUSES, Outcome

pytestmark = pytest.mark.alone

CHEATS, ON_GPU = entries("cheats"), entries("cheats/gpu")
MISSED = [entry for entry in CHEATS if "missed" in entry.header]
PLACES = [Path(place) for place in ("/dev/shm", "/tmp", "/var/tmp")]
TRIES = 4
MACHINE = {
    "x86_64": platform.machine() == "x86_64",
    "idle processors": os.getloadavg()[0] < len(os.sched_getaffinity(0)) > 1,
    "confinement": True,  # what the machine has of it, the Outcome says
}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """No file stays of a cheat that leaves some for another."""
    yield
    left = [path for place in PLACES if place.is_dir() for path in place.glob("kcap_cheat*")]
    for path in left:
        path.unlink()
    assert not left


def test_every_published_way_is_tried():
    rows = set().union(*(entry.rows for entry in [*CHEATS, *ON_GPU]))
    assert rows == set(range(1, 31))
    assert len(CHEATS) >= 36 and len(ON_GPU) >= 8


@pytest.mark.parametrize("entry", [*CHEATS, *ON_GPU], ids=lambda entry: entry.name)
def test_header_is_whole(entry: Entry):
    definitions = Dataset.load(DATASET).definitions
    assert set(entry.header) >= {"definition", "row", "does", "naive", "expect", "reason"}
    assert entry.solution.definition in definitions
    assert entry.expect and entry.expect <= set(STATUSES) - {"NOT_JUDGED"}
    assert "PASSED" not in entry.expect
    assert re.compile(entry.header["reason"]) and not re.search(entry.header["reason"], "")


def params(some: list[Entry]) -> list[object]:
    """Those that the judge is known to miss are expected to fail, and say so once they no longer do."""
    marks = {entry.name: [pytest.mark.xfail(reason=entry.header["missed"], strict=True)] for entry in MISSED}
    return [pytest.param(entry, marks=marks.get(entry.name, []), id=entry.name) for entry in some]


@pytest.mark.parametrize("entry", params(CHEATS))
def test_cheat_is_caught(benches: dict[str, Bench], entry: Entry):
    is_caught(benches["hasty" if "hasty" in entry.header else "cpu"], entry)


def test_what_one_run_wrote_no_other_finds(benches: dict[str, Bench]):
    """The process of a Solution ends when another's turn comes: then the first starts anew, in a new folder."""
    files, plain = (next(one for one in CHEATS if one.name == name) for name in ("results_from_a_file", "zeros"))
    first, _, second = (benches["cpu"].judge(entry)[0] for entry in (files, plain, files))
    assert first.status == second.status != "PASSED"


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [*ON_GPU, *CHEATS], ids=lambda entry: entry.name)
def test_cheat_is_caught_on_a_gpu(benches: dict[str, Bench], entry: Entry):
    if entry.header.get("devices") == "cpu":
        pytest.skip("it works on the CPU's memory")
    is_caught(benches["cuda"], entry)


def is_caught(bench: Bench, entry: Entry) -> None:
    needs = entry.header.get("needs", "")
    if needs and not MACHINE[needs]:
        pytest.skip(f"needs {needs}")
    for _ in range(TRIES):  # what a busy machine makes of a few batches does not come again: a gain does
        outcomes = bench.judge(entry)
        last = outcomes[-1]
        if entry.at_most_speedup is None or last.status != "PASSED" or _gained_nothing(entry, last):
            break
    if needs == "confinement" and "landlock" not in last.confined and last.status not in entry.expect:
        pytest.skip("this machine confines nothing")
    _check(entry, outcomes)


def _check(entry: Entry, outcomes: list[Outcome]) -> None:
    """The Outcome of the last Workload is caught; whoever fails on one of several has passed on the others."""
    caught = outcomes[-1]
    if caught.status == "PASSED" and _gained_nothing(entry, caught):
        return
    assert caught.status in entry.expect, told(caught)
    reason = entry.header["reason"]
    if "off by" in reason:  # what was not computed in time may be the same each time: the memory is
        reason += f"|{CONSTANT}"
    assert re.search(reason, f"{caught.reason}\n{caught.log}"), told(caught)
    assert caught.speedup is None


def _gained_nothing(entry: Entry, passed: Outcome) -> bool:
    """Its trick came to nothing: the time is the true one."""
    assert passed.time is not None, told(passed)
    if entry.at_least_us is not None:
        return passed.time.median_us >= entry.at_least_us
    return entry.at_most_speedup is not None and (passed.speedup or 0) <= entry.at_most_speedup

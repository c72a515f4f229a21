"""Hostile Solutions cost their own results only: the judge goes on, and nothing of them is left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cheat_catalogue import HERE, Entry, entries, read
from judging import Bench, eventually, told

pytestmark = pytest.mark.alone

HOSTILE = entries("hostile")
HONEST = read(HERE / "honest" / "plain.py")
PLACES = [Path(place) for place in ("/dev/shm", "/tmp", "/var/tmp")]


def test_there_are_hostile_solutions_of_every_kind():
    assert len(HOSTILE) >= 16


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: entry.name)
def test_hostile_solution_costs_its_own_results_only(benches: dict[str, Bench], entry: Entry):
    bench = benches["impatient" if "impatient" in entry.header else "hasty"]
    if "needs" in entry.header and "landlock" not in bench.judge(HONEST)[0].confined:
        pytest.skip("this machine confines nothing")
    before = descendants(bench), bench.worker.restarts
    outcome = bench.judge(entry)[0]
    assert outcome.status in entry.expect, told(outcome)
    assert re.search(entry.header.get("reason", ""), f"{outcome.reason}\n{outcome.log}"), told(outcome)
    assert (passed := bench.judge(HONEST)[0]).status == "PASSED", told(passed)
    assert bench.worker.restarts == before[1], "the judge itself died"
    assert eventually(lambda: len(descendants(bench)) <= max(len(before[0]), 8)), descendants(bench)
    assert not [path for place in PLACES if place.is_dir() for path in place.glob("kcap_hostile*")]


def test_nothing_is_left_when_the_judge_ends(judged_alone):
    """No process, whatever the last Solution started; the scratch is the scheduler's to remove."""
    with judged_alone() as bench:
        bench.judge(read(HERE / "hostile" / "forks.py"))
        assert descendants(bench)
        pids = descendants(bench)
    assert eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


def descendants(bench: Bench) -> list[int]:
    """Processes below the judge worker, its own among them."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(name)] = int(stat[1])
    found = [bench.worker.process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found

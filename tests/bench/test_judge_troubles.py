"""The judge where its machine lacks what it takes, or ends a part of it: that costs one Workload, and says so."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench_datasets import of
from cheat_catalogue import HERE, read
from judge_here import made, outcome
from judging import eventually, told
from solution_files import RETURNING

HONEST = read(HERE / "honest" / "plain.py")
LARGE = 1 << 16  # rows: 1 MiB of inputs, which the judge hands over


@contextmanager
def limited(which, value, pid=0):
    soft, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, which, (soft, hard))


def goes_on(judge, m=64):
    found = outcome(judge, RETURNING, m=m)
    assert found.status == "PASSED", found.reason


def descriptors(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("m", [64, LARGE])
def test_too_few_descriptors_cost_one_workload(judge, m):
    goes_on(judge, m)
    before, found = descriptors(), []
    for more in (0, 1, 2, 4, 6, 9):
        with limited(resource.RLIMIT_NOFILE, before + more):
            found.append(outcome(judge, RETURNING, name=f"s{more}", m=m))
    assert {one.status for one in found} <= {"NOT_JUDGED", "PASSED"} and found[0].status == "NOT_JUDGED"
    assert "this machine lacks what judging takes: [Errno 24] Too many open files" in found[0].reason
    goes_on(judge, m)
    assert descriptors() <= before


@pytest.mark.parametrize("m", [64, LARGE])
@pytest.mark.parametrize("size", [1, 1 << 19])
def test_too_little_room_costs_one_workload(judge, m, size):
    goes_on(judge, m)
    before = descriptors()
    with limited(resource.RLIMIT_FSIZE, size):
        found = outcome(judge, RETURNING, m=m)
    assert found.status == "NOT_JUDGED" and "File too large" in found.reason, found.reason
    goes_on(judge, m)
    assert descriptors() <= before


def test_a_fork_server_that_lacks_descriptors_says_so_and_lives(judge):
    goes_on(judge)
    server = judge.server._process.pid
    before, reasons = descriptors(server), []
    for more in (-1, 0, 2, 4, 6):
        with limited(resource.RLIMIT_NOFILE, before + more, server):
            reasons.append(outcome(judge, RETURNING, name=f"s{more}").reason or "")
    assert any("too many open files" in one.lower() for one in reasons), reasons
    assert not any("the fork server is gone" in one for one in reasons)
    goes_on(judge)
    assert descriptors(server) <= before


def test_a_dead_fork_server_costs_one_answer(judged_alone):
    with judged_alone() as bench:
        first = bench.judge(HONEST)[0]
        assert first.status == "PASSED", told(first)
        server = next(pid for pid in below(bench) if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text())
        started = below(bench)[1:]
        os.kill(server, signal.SIGKILL)
        with pytest.raises(AssertionError, match=r"the judge worker itself.*the fork server is gone"):
            bench.judge(HONEST)
        assert eventually(lambda: gone(started)) and not list(bench.scratch.iterdir())
        again = bench.judge(HONEST)[0]
        assert again.status == "PASSED" and bench.worker.restarts == 1, told(again)


def test_a_judge_that_is_killed_leaves_no_process(judged_alone):
    with judged_alone() as bench:
        bench.judge(HONEST)
        left = []

        def kill():
            time.sleep(2)
            left.extend(below(bench))
            bench.worker.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(AssertionError, match=r"the judge worker itself.*SIGKILL"):
            bench.judge(read(HERE / "hostile" / "hangs.py"))
        thread.join()
        assert len(left) > 2 and eventually(lambda: gone(left))


def below(bench):
    """The judge worker and what it started."""
    found = [bench.worker.process.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def gone(pids):
    return not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("m", [64, LARGE])
def test_a_candidate_has_no_descriptor_but_its_own(judge, m):
    """Nothing of the fork server's or of other candidates'; of the judge's memory none once it is mapped."""
    source = """import os

def run(x, eps):
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink("/proc/self/fd/" + number).split(":")[0])
        except OSError:
            pass
    raise RuntimeError(" ".join(sorted(links)))
"""
    assert outcome(judge, source, m=m).reason == "RuntimeError: /dev/null pipe pipe socket"


MIXED = made(
    "mixed",
    "(x * eps, (x * 100).int(), x > 0)",
    outputs={"y": of("m n"), "i": of("m n", "int32"), "b": of("m n", "bool")},
)
MIXED_SOURCE = "def run(x, eps):\n    y, i, b = x * eps, (x * 100).int(), x > 0\n    {}\n    return y, i, b\n"


@pytest.mark.parametrize(
    "change, reason",
    [
        ("pass", None),
        ("i.view(-1)[5] += 1", "i: differs by up to 1, where it must be equal"),
        ("b.view(-1)[5] ^= True", "b: differs by up to 1, where it must be equal"),
        ("y.view(-1)[5] += 1", "y: is off by"),
        ("y.view(-1)[5] = float('inf')", "y: has inf or nan where the reference has numbers"),
    ],
)
def test_one_element_that_is_wrong_in_one_of_several_outputs_is_wrong(judge, change, reason):
    found = outcome(judge, MIXED_SOURCE.format(change), name=f"mixed{abs(hash(change))}", of_definition=MIXED)
    if reason is None:
        assert found.status == "PASSED", found.reason
        return
    assert found.status == "INCORRECT_NUMERICAL" and found.reason.startswith(reason), found.reason

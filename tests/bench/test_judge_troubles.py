"""The judge where its machine lacks what it takes, or ends a part of it: that costs one Workload, and says so."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bench_datasets import of
from cheat_catalogue import HERE, read
from judge_here import judged, made, outcome, scale
from judging import eventually, told
from solution_files import RETURNING, solution

from kcap.bench.judge.driver import device
from kcap.bench.sandbox.process_tree import below
from kcap.errors import KcapError

HONEST = read(HERE / "honest" / "plain.py")
LARGE = 1 << 13  # rows: more bytes than the files may have whose size is limited
TOO_MANY = "this machine lacks what judging takes: [Errno 24] Too many open files"
FREE, ENOUGH = range(0, 24, 3), 64
REPORTING = """import mmap, os

for number in range(3, 64):
    try:
        report = "memfd:report" in os.readlink(f"/proc/self/fd/{{number}}")
    except OSError:
        continue
    if report:
        os.pwrite(number, {words}, 0)
os._exit(4)
"""


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


def limit_with(free, pid="self"):
    """The limit under which a process may open `free` files more: it bounds numbers, and lower ones may be free."""
    folder = f"/proc/{pid}/fd"
    taken = {int(number) for number in os.listdir(folder) if os.path.lexists(f"{folder}/{number}")}  # not its own
    return next(itertools.islice((number for number in itertools.count() if number not in taken), free, None))


def lacking(judge, free, m=64, pid=None):
    """What comes of a Solution that has not been judged, where the judge or process `pid` may open `free` files."""
    with limited(resource.RLIMIT_NOFILE, limit_with(free, pid or "self"), pid or 0):
        found = outcome(judge, RETURNING, name=f"s{free}", m=m)
    if found.status == "NOT_JUDGED":
        assert found.reason.startswith(TOO_MANY), found.reason
        assert not list(judge.limits.scratch.iterdir())
    return found.status


@pytest.mark.parametrize("m", [64, LARGE])
@pytest.mark.parametrize("whose", ["judge", "fork server"])
def test_too_few_descriptors_cost_one_workload(judge, whose, m):
    goes_on(judge, m)
    server = judge.server._process.pid
    before = descriptors(), descriptors(server)
    pid = server if whose == "fork server" else None
    # upwards mostly without processes from before, downwards with them, whose descriptors may do for the next
    found = {lacking(judge, free, m, pid) for free in (*FREE, *reversed(FREE))}
    assert found == {"NOT_JUDGED", "PASSED"} if pid else "PASSED" in found <= {"NOT_JUDGED", "PASSED"}
    assert lacking(judge, ENOUGH, m, pid) == "PASSED"
    goes_on(judge, m)
    assert (descriptors(), descriptors(server)) <= before and judge.server._process.pid == server


@pytest.mark.parametrize("m", [64, LARGE])
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_too_little_room_costs_one_workload(judge, m, size):
    goes_on(judge, m)
    before = descriptors()
    with limited(resource.RLIMIT_FSIZE, size):
        found = outcome(judge, RETURNING, name=f"s{size}", m=m)
    assert found.status == "NOT_JUDGED" and "File too large" in found.reason, found.reason
    goes_on(judge, m)
    assert descriptors() <= before


def test_a_fork_server_that_can_open_nothing_ends_its_candidates_later(judge):
    goes_on(judge)
    server = judge.server._process.pid
    before, living = descriptors(server), len(below(server))
    with limited(resource.RLIMIT_NOFILE, 3, server):
        found = [outcome(judge, RETURNING, name=name) for name in ("one", "two")]
    assert [one.status for one in found] == ["NOT_JUDGED"] * 2 and all(TOO_MANY in one.reason for one in found)
    goes_on(judge)
    assert descriptors(server) <= before and judge.server._process.pid == server
    assert len(below(server)) == living


COUNTING = """import os

asked = 0


def run(x, eps):
    global asked
    asked += 1
    if asked > 60:
        {end}
    return x * eps
"""


@pytest.fixture
def hurried(judge, monkeypatch):
    """The judge, whose Solutions get two seconds."""
    judge.close()
    monkeypatch.setattr(judge, "limits", replace(judge.limits, timeout=2.0))
    yield judge
    judge.close()


@pytest.mark.alone
@pytest.mark.parametrize(
    "end, reason",
    [
        ("os._exit(3)", "its reference's process ended: exit code 3"),
        ("__import__('time').sleep(600)", "its reference took longer than 6 s (3 times --timeout)"),
        ("raise ValueError('no more')", "its reference fails: ValueError: no more"),
        ("raise RuntimeError('CUDA error: unknown')", "its reference fails: RuntimeError: CUDA error: unknown"),
    ],
)
def test_a_reference_that_fails_while_it_is_timed_is_not_the_solutions_fault(hurried, end, reason):
    ends = made("ends_timed", "x", reference=COUNTING.format(end=end))
    mine = solution({"main.py": RETURNING}, definition="ends_timed", destination_passing_style=False)
    found = judged(hurried, mine, ends, scale(of_definition=ends))
    assert (found.status, found.reason) == ("NOT_JUDGED", reason)
    goes_on(hurried)
    again = judged(hurried, mine, ends, scale(of_definition=ends))
    assert (again.status, again.reason) == ("NOT_JUDGED", reason), "nor is it counted as a death of the Solution's"


@pytest.mark.alone
def test_what_is_not_built_in_time_says_which_time(hurried, monkeypatch):
    monkeypatch.setattr(hurried, "limits", replace(hurried.limits, build_timeout=0.5))
    found = outcome(hurried, f"__import__('time').sleep(600)\n{RETURNING}")
    assert (found.status, found.reason) == ("TIMEOUT", "was not built within 0.5 s (--build-timeout)")


def test_a_gpu_that_does_not_answer_is_not_there(monkeypatch):
    monkeypatch.setattr(device, "LIMIT_S", 0.01)
    with pytest.raises(KcapError, match=r"cuda:0: cannot be used: it does not answer within 0\.01 s"):
        device.describe_device("cuda:0", 1)


@pytest.mark.parametrize(
    "source, reason",
    [
        ("import os\nos._exit(3)", "its process ended while it was built: exit code 3"),
        (REPORTING.format(words=b"5"), "its process ended while it was built: exit code 4"),
        (REPORTING.format(words=b"[]"), "its process ended while it was built: exit code 4"),
        (REPORTING.format(words=b"{"), "its process ended while it was built: exit code 4"),
    ],
)
def test_nothing_is_left_of_a_solution_that_ends_while_it_is_built(judge, source, reason):
    goes_on(judge)
    server = judge.server._process.pid
    before = descriptors(server), len(list(judge.limits.scratch.iterdir()))
    assert outcome(judge, source, name=f"ends{abs(hash(source))}").reason == reason
    goes_on(judge)
    assert (descriptors(server), len(list(judge.limits.scratch.iterdir()))) == before


def test_a_dead_fork_server_costs_one_answer(judged_alone):
    with judged_alone() as bench:
        first = bench.judge(HONEST)[0]
        assert first.status == "PASSED", told(first)
        started = below(bench.worker.process.pid)
        server = next(pid for pid in started if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text())
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
            left.extend([bench.worker.process.pid, *below(bench.worker.process.pid)])
            bench.worker.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(AssertionError, match=r"the judge worker itself.*SIGKILL"):
            bench.judge(read(HERE / "hostile" / "hangs.py"))
        thread.join()
        assert len(left) > 2 and eventually(lambda: gone(left))


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
    "(x * eps, (x * 64).int(), x > 0)",
    outputs={"y": of("m n"), "i": of("m n", "int32"), "b": of("m n", "bool")},
)
MIXED_SOURCE = "def run(x, eps):\n    y, i, b = x * eps, (x * 64).int(), x > 0\n    {}\n    return y, i, b\n"


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


UPCAST = """import os

import torch


def run(x, eps):
    if x.dtype == torch.float64:
        {end}
    return x * eps
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    "end",
    ["os._exit(3)", "os.kill(os.getpid(), 9)", "__import__('time').sleep(600)", "raise RuntimeError('CUDA error')"],
)
def test_a_reference_that_cannot_go_on_in_float64_is_run_in_float32(hurried, end):
    narrow = made("narrow", "", reference=UPCAST.format(end=end))
    for name in ("one", "two"):
        found = outcome(hurried, RETURNING, name=name, of_definition=narrow)
        assert (found.status, found.accuracy.truth) == ("PASSED", "reference in float32"), found.reason

"""How far the judge believes a clock that is in a Solution's process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge import timing
from kcap.bench.judge.process import MachineCpuTime, cpu_time_of
from kcap.bench.judge.timing import (
    Batches,
    check_idle,
    check_processors,
    check_strays,
    cross_check_clock,
    cross_check_with_retries,
    time_both,
)
from kcap.bench.judge.verdict import Rejected, Undecided

PING = 100_000.0


def batches(time_us, between_us, stray_us=0.0, count=100, threads=1, hidden_us=0.0):
    candidate = SimpleNamespace(limits=SimpleNamespace(threads=threads, gpu=None), pid=os.getpid())
    made = Batches(candidate, count)
    made.samples_us, made.stray_ns, made.hidden_ns = [time_us] * 5, [stray_us * 1e3] * 5, [hidden_us * 1e3] * 5
    made.between_ns = [between_us * 1e3 + PING / count] * 5
    return made


def alone():
    """A moment since which nobody else has had a processor."""
    now = MachineCpuTime.now(os.getpid(), os.getpid())
    return MachineCpuTime(now.clock - 10**9, now.busy + 10**12, now.ours)


@given(st.floats(1, 1e5), st.floats(0.5, 1e4), st.floats(0, 1))
def test_an_honest_clock_is_believed_and_its_slack_is_said(time_us, driver_us, noise):
    ours, theirs = batches(time_us, driver_us * (1 + 0.2 * noise)), batches(time_us * 2, driver_us)
    assert cross_check_clock(ours, theirs, PING) >= 2000


@given(st.floats(20, 1e5), st.floats(0.5, 20))
def test_a_clock_that_hides_the_work_is_refused(real_us, driver_us):
    said = real_us / 100
    ours, theirs = batches(said, driver_us + real_us - said), batches(real_us, driver_us)
    with pytest.raises(Rejected, match=r"the clock in its process says .* the judge's") as refused:
        cross_check_clock(ours, theirs, PING)
    assert refused.value.status == "REWARD_HACK"


def test_a_disturbed_machine_is_asked_again_before_it_is_refused():
    ours, theirs = batches(100, 500), batches(100, 5)
    calls = []

    def quiet(keep):
        calls.append(keep)
        ours.samples_us.append(90)
        ours.stray_ns.append(0)
        ours.between_ns.append((500e3 if len(calls) < 3 else 5e3) + PING / 100)

    ours.take, theirs.take = quiet, lambda keep: None
    assert cross_check_with_retries(ours, theirs, PING, alone())
    assert calls == [0] * 5  # the last three are vouched for
    assert ours.samples_us == [90] * 3


def test_a_clock_that_hides_the_work_of_most_batches_is_refused():
    ours, theirs = batches(1, 104), batches(100, 5)
    ours.samples_us[:3], ours.between_ns[:3] = [100] * 3, [5e3 + PING / 100] * 3
    for more in (ours.samples_us, ours.between_ns, ours.stray_ns):
        more += more[-1:] * 2  # now four batches of seven
    with pytest.raises(Rejected, match="the clock in its process says 1 µs, the judge's 100 µs"):
        cross_check_clock(ours, theirs, PING)


def test_what_is_said_of_a_batch_that_is_not_vouched_for_counts_nowhere():
    ours, theirs = batches(1, 104), batches(100, 5)
    ours.samples_us[:3], ours.between_ns[:3] = [100] * 3, [5e3 + PING / 100] * 3
    cross_check_clock(ours, theirs, PING)
    assert ours.samples_us == [100] * 3


@pytest.mark.parametrize(
    ("said_us", "between_us", "count"),
    [(100, 5, 40), (600, 5, 10), (50, 5, 80), (0.001, 1, 4096), (0.001, 500, 399), (0.001, 30_000, 10)],
)
def test_a_batch_that_turns_out_too_short_is_sized_again(said_us, between_us, count):
    ours = batches(said_us, between_us, count=10)
    ours.wanted_ns, ours.candidate.most = 4e6, 4096
    assert ours.grow(said_us * 1e3, (said_us + between_us) * 1e3) == (count != 10)
    assert ours.count == count and bool(ours.samples_us) == (count == 10)


def test_a_clock_that_never_agrees_is_refused_in_the_end():
    ours, theirs = batches(1, 500), batches(100, 5)
    ours.take = theirs.take = lambda keep: None
    with pytest.raises(Rejected):
        cross_check_with_retries(ours, theirs, PING, alone())


@pytest.mark.parametrize("threads, stray, fine", [(1, 2, True), (1, 20, False), (4, 20, True), (4, 200, False)])
def test_work_that_goes_on_after_the_return_is_refused(threads, stray, fine):
    ours, theirs = batches(50, 5, stray, threads=threads), batches(50, 5)
    if fine:
        check_strays(ours, theirs)
        return
    with pytest.raises(Rejected, match="works on when an invocation has returned"):
        check_strays(ours, theirs)


@pytest.mark.parametrize(
    "threads, used, fine",
    [
        (1, [0.9, 1.0], True),
        (1, [0.9, 1.5, 0.9], True),
        (1, [0.9, 1.3, 1.2], False),
        (2, [1.9], True),
        (2, [3.1], False),
    ],
)
def test_more_processors_than_it_was_given_are_refused(threads, used, fine):
    ours = batches(50, 5, threads=threads)
    ours.candidate.limits.gpu, ours.processors = None, used
    if fine:
        check_processors(ours)
        return
    with pytest.raises(Rejected, match=rf"processors at a time, and was given {threads}"):
        check_processors(ours)


def test_what_a_process_and_its_threads_use_is_seen_from_outside():
    spin = (
        "import threading\ndef work():\n  while True: pass\nthreading.Thread(target=work, daemon=True).start()\nwork()"
    )
    with subprocess.Popen([sys.executable, "-c", spin]) as spinning:
        try:
            before = cpu_time_of(spinning.pid)
            time.sleep(0.5)
            after = cpu_time_of(spinning.pid)
        finally:
            spinning.kill()
    assert after.own > before.own and after.company > before.company
    assert cpu_time_of(spinning.pid).own == 0  # it is gone


@pytest.mark.parametrize("idle, fine", [([], True), ([0.0, 0.3, 0.01], True), ([0.5, 0.6, 0.0], False)])
def test_work_while_the_reference_is_timed_is_refused(idle, fine):
    if fine:
        check_idle(idle)
        return
    with pytest.raises(Rejected, match="while the reference is timed: 50% of a processor"):
        check_idle(idle)


def test_work_while_the_driver_alone_is_timed_is_refused(monkeypatch):
    ours, theirs, driver = (batches(50, 5) for _ in range(3))
    driver.empty, driver.samples_us, ours.candidate.most = True, [], ours.count
    ours.processors = [1.0]

    def slowed(keep):
        driver.samples_us.append(1)
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass

    ours.take, driver.take = lambda keep: (50.0, []), slowed
    monkeypatch.setattr(timing, "control_batches", lambda ours, theirs: driver)
    monkeypatch.setattr(timing, "ping_ns", lambda candidate: PING)
    with pytest.raises(Rejected, match="work while the reference is timed"):
        time_both(ours, theirs, 0.001, 0, lambda kept: None)


@pytest.mark.parametrize(
    "said, hidden, driver, verdict",
    [
        (1, 0, 5, Undecided),
        (1, -400, 5, Undecided),
        (1, 10, 5, Undecided),  # what the driver does, and some more, for its caches are others'
        (1, 100, 5, Rejected),
        (1, 100, 100, Undecided),
        (100, 150, 5, Undecided),
        (100, 400, 5, Rejected),
    ],
)
def test_on_a_busy_machine_cpu_time_that_is_not_said_decides_and_nothing_else(said, hidden, driver, verdict):
    ours, theirs = batches(said, 500, hidden_us=hidden), batches(100, 5, hidden_us=driver)
    ours.take = theirs.take = lambda keep: None
    now = MachineCpuTime.now(os.getpid(), os.getpid())
    crowded = MachineCpuTime(now.clock - 10**9, now.busy - 2 * 10**9, now.ours)
    words = r"other processes had .* processors" if verdict is Undecided else "the clock in its process"
    with pytest.raises(verdict, match=words):
        cross_check_with_retries(ours, theirs, PING, crowded)


def test_what_others_have_of_the_machine_is_told_and_ours_is_not():
    before = MachineCpuTime.now()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.5)
        assert MachineCpuTime.now().others(before) > 0.4
        other.kill()
    spun = MachineCpuTime(before.clock, before.busy, before.ours)
    assert MachineCpuTime(spun.clock + 10**9, spun.busy + 10**9, spun.ours + 10**9).others(spun) == 0

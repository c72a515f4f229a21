"""How far the judge believes a clock that is in a Solution's process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge.batching import Batches
from kcap.bench.judge.evidence import Refused
from kcap.bench.judge.stopwatch import check_strays, vouch, vouched

PING = 100_000.0


def batches(time_us, between_us, stray_us=0.0, count=100, threads=1):
    candidate = SimpleNamespace(limits=SimpleNamespace(threads=threads))
    made = Batches(candidate, count)
    made.samples_us, made.stray_ns = [time_us] * 5, [stray_us * 1e3] * 5
    made.between_ns = [between_us * 1e3 + PING / count] * 5
    return made


@given(st.floats(1, 1e5), st.floats(0.5, 1e4), st.floats(0, 1))
def test_an_honest_clock_is_believed_and_its_slack_is_said(time_us, driver_us, noise):
    ours, theirs = batches(time_us, driver_us * (1 + 0.2 * noise)), batches(time_us * 2, driver_us)
    assert vouch(ours, theirs, PING) >= 2000


@given(st.floats(20, 1e5), st.floats(0.5, 20))
def test_a_clock_that_hides_the_work_is_refused(real_us, driver_us):
    said = real_us / 100
    ours, theirs = batches(said, driver_us + real_us - said), batches(real_us, driver_us)
    with pytest.raises(Refused, match=r"the clock in its process says .* the judge's") as refused:
        vouch(ours, theirs, PING)
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
    assert vouched(ours, theirs, PING)
    assert calls == [0] * 5  # the last three are vouched for
    assert ours.samples_us == [90] * 3


def test_a_clock_that_hides_the_work_of_most_batches_is_refused():
    ours, theirs = batches(1, 104), batches(100, 5)
    ours.samples_us[:3], ours.between_ns[:3] = [100] * 3, [5e3 + PING / 100] * 3
    for more in (ours.samples_us, ours.between_ns, ours.stray_ns):
        more += more[-1:] * 2  # now four batches of seven
    with pytest.raises(Refused, match="the clock in its process says 1 µs, the judge's 100 µs"):
        vouch(ours, theirs, PING)


def test_what_is_said_of_a_batch_that_is_not_vouched_for_counts_nowhere():
    ours, theirs = batches(1, 104), batches(100, 5)
    ours.samples_us[:3], ours.between_ns[:3] = [100] * 3, [5e3 + PING / 100] * 3
    vouch(ours, theirs, PING)
    assert ours.samples_us == [100] * 3


def test_a_clock_that_never_agrees_is_refused_in_the_end():
    ours, theirs = batches(1, 500), batches(100, 5)
    ours.take = theirs.take = lambda keep: None
    with pytest.raises(Refused):
        vouched(ours, theirs, PING)


@pytest.mark.parametrize("threads, stray, fine", [(1, 2, True), (1, 20, False), (4, 20, True), (4, 200, False)])
def test_work_that_goes_on_after_the_return_is_refused(threads, stray, fine):
    ours, theirs = batches(50, 5, stray, threads=threads), batches(50, 5)
    if fine:
        check_strays(ours, theirs)
        return
    with pytest.raises(Refused, match="works on when an invocation has returned"):
        check_strays(ours, theirs)

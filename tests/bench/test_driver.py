"""What the driver gives a Solution on the CPU, what the judge finds of it, and that it stands still between runs."""

from __future__ import annotations

import os
import time

import pytest
import torch
from bench_datasets import definition, of, workload
from forked_candidates import Forked

from kcap.bench.judge.driver import driver, protocol
from kcap.bench.judge.input_pool import draw_inputs
from kcap.bench.judge.process import ProcessEnded, Stirred

pytestmark = pytest.mark.alone

COPY = definition("copy", {"x": of("m n")}, {"y": of("m n")}, "x.clone()")
LARGE = 1 << 17  # rows: 2 MiB


@pytest.fixture(params=[1, 7, 300, LARGE])
def drawn(request):
    return draw_inputs(COPY, workload(COPY, "w", request.param), None, None)


@pytest.fixture
def small():
    return draw_inputs(COPY, workload(COPY, "w", 16), None, None)


@pytest.fixture(scope="module")
def forked():
    driver.build_driver()
    with Forked("cpu_candidate.py") as candidates:
        yield candidates


@pytest.fixture(scope="module")
def both(forked):
    """Two processes of one Solution."""
    return [forked.start("copied") for _ in range(2)]


@pytest.fixture
def started(forked):
    return forked.start


@pytest.fixture
def one(both, drawn):
    both[0].open(drawn, 12)
    return both[0]


def inputs(one, seed, count, chosen):
    """Of the invocations `chosen` of `count`, what they were given, for it is what they return."""
    done = one.run(range(count), seed, chosen=count)
    assert done.report == protocol.Report(protocol.FINE, max(count - 1, 0))
    assert one.changed(chosen).code == protocol.FINE
    return [done.outputs[number][0].view(-1) for number in chosen]


def test_no_number_of_one_invocation_is_in_another(one, drawn):
    found = [numbers for seed in (5, 6) for numbers in inputs(one, seed, 12, range(12))]
    every = torch.cat(found)
    assert len(every) - len(every.unique()) <= len(every) ** 2 / 2**22  # floats of one size are not so many


def test_two_processes_are_given_the_same_inputs(both, drawn):
    for one in both:
        one.open(drawn, 9)
    found = [inputs(one, 7, 9, (0, 4, 8)) for one in both]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_more_invocations_than_sets_are_refused(both, small):
    both[0].open(small, 2)
    assert "more invocations than sets" in both[0].run(range(3), 1).report.text


TURNED = definition("turned", {"x": of("m n")}, {"y": of("n m")}, "x.T.contiguous()")
VIEWS = [(TURNED, "turned", "turned_in_a_row"), (COPY, "negated_view", "negated"), (COPY, "padded", "copied")]


@pytest.mark.parametrize(("given", "view", "whole"), VIEWS, ids=["transposed", "negated", "padded"])
def test_a_view_is_read_as_what_it_shows(started, given, view, whole):
    made, found = draw_inputs(given, workload(given, "w", 600), None, None), []
    for one in (started(view), started(whole)):
        one.open(made)
        done = one.run(range(3), 7, chosen=3)
        assert done.report.code == protocol.FINE
        found.append(done.outputs[2][0])
    assert torch.equal(*found)


def test_one_memory_for_every_output_is_copied_each_time(started, drawn):
    one, other = started("same_memory"), started("copied")
    for candidate in (one, other):
        candidate.open(drawn, 6)
    for count in (3, 6):
        mine, theirs = inputs(one, count, count, range(count)), inputs(other, count, count, range(count))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_changed_input_is_told_by_the_judge_itself(started, drawn):
    one = started("mutated")
    one.open(drawn)
    assert one.run(range(3), 5).report.code == protocol.FINE
    told = one.changed([1])
    assert (told.code, told.text) == (protocol.INPUT, "changed its input x")


def test_an_input_that_was_kept_is_worth_nothing(started, drawn):
    one = started("earlier")
    one.open(drawn)
    first, second = (inputs(one, seed, 1, (0,))[0] for seed in (1, 2))
    assert not torch.equal(first, second)


def test_which_invocation_raised_is_told(started, small):
    one = started("called_thrice")
    one.open(small, 8)
    assert one.run(range(8), 1).report.iteration == 2


def test_what_it_raises_is_told(started, small):
    one = started("called")
    one.open(small)
    assert one.run(range(3), 7).report == protocol.Report(protocol.RAISED, 0, 0, "RuntimeError: it was called")


def test_the_clock_says_what_a_stopwatch_would(started, small):
    """One that the Solution holds itself: how long a sleep really lasts depends on the machine."""
    one, beside = started("stopwatch"), []
    one.open(small, 20)
    way = min(one.nothing() for _ in range(9))
    for _ in range(5):
        done = one.run(range(20), 1, chosen=20)
        held_ns = float(done.outputs[19][0][0, 0]) * 1e3
        assert 40e6 <= held_ns <= done.elapsed_ns
        beside.append(done.elapsed_ns - held_ns)
    assert min(beside) < way + 1e6
    assert way < 2e6


def test_the_judge_is_told_when_all_has_been_told_to_stop(started, small):
    one, seen = started("waits"), []
    one.open(small, 20)
    one.run(range(20), 1)
    began = time.perf_counter_ns()
    done = one.ask(protocol.run_message(20, 0), told=lambda: seen.append(time.perf_counter_ns()))
    assert done.report.code == protocol.FINE and len(seen) == 1
    assert 0 <= seen[0] - began - 40e6 < time.perf_counter_ns() - began


def test_nothing_runs_between_two_runs(started, small):
    """Neither a thread nor a process of its own, whatever time passes."""
    one = started("counting_thread")
    one.open(small)
    before = inputs(one, 1, 1, (0,))[0][0]
    time.sleep(0.5)
    assert inputs(one, 2, 1, (0,))[0][0] < before * 20 + 1e6

    one = started("child")
    one.open(small)
    pid = int(inputs(one, 1, 1, (0,))[0][0])
    before = cpu_ticks(pid)
    time.sleep(0.3)
    assert cpu_ticks(pid) == before and state(pid) == "T"


def cpu_ticks(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11:13]


def state(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]


def test_who_has_a_timer_let_it_run_on_is_found(started, small):
    one = started("woken")
    one.open(small)
    assert one.run(range(1), 1).report.code == protocol.FINE
    time.sleep(0.3)
    with pytest.raises(Stirred):
        one.run(range(1), 2)


def test_who_stops_itself_before_it_is_done_has_reported_nothing(started, small):
    one = started("stops_itself")
    one.open(small)
    with pytest.raises(ProcessEnded, match="it stopped itself"):
        one.run(range(1), 1)


def test_an_output_that_is_nowhere_ends_the_process(started, small):
    one = started("nowhere")
    one.open(small)
    with pytest.raises(ProcessEnded, match="its outputs are nowhere"):
        one.run(range(3), 1, chosen=3)


def test_the_memory_of_a_workload_is_given_back(both, drawn):
    before = len(os.listdir("/proc/self/fd"))
    both[0].open(drawn)
    for seed in range(5):
        assert both[0].run(range(3), seed).report.code == protocol.FINE
    held = len(os.listdir("/proc/self/fd"))
    both[0].forget()
    assert held <= before + 3 and len(os.listdir("/proc/self/fd")) <= before

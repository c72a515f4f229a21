"""What the driver gives a Solution on the CPU, and what it keeps of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from bench_datasets import definition, of, workload
from forked_candidates import Forked
from judging import eventually

from kcap.bench.judge import candidate as candidates
from kcap.bench.judge import input_pool
from kcap.bench.judge.driver import driver, protocol
from kcap.bench.judge.input_pool import open_input_pool

COPY = definition("copy", {"x": of("m n")}, {"y": of("m n")}, "x.clone()")


LARGE = 1 << 17  # rows: 2 MiB


@pytest.fixture(params=[1, 7, 300, LARGE])
def drawn(request):
    with open_input_pool(COPY, workload(COPY, "w", request.param), None, None) as made:
        yield made


@pytest.fixture
def large():
    with open_input_pool(COPY, workload(COPY, "w", LARGE), None, None) as made:
        yield made


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
    both[0].open(drawn)
    return both[0]


def inputs(one, seed, count, chosen):
    """Of the invocations `chosen` of `count`, what they were given, for it is what they return."""
    assert one.run(seed, count, keep=chosen).code == protocol.FINE
    assert one.deliver(chosen).code == protocol.FINE
    return [one.outputs(number)[0].view(-1) for number in chosen]


def pool(drawn):
    content = drawn.contents[0]
    size = 4 * (torch.Size(content.shape).numel() + content.slack)
    return torch.frombuffer(bytearray(os.pread(drawn.pool, size, content.offset)), dtype=torch.float32)


def test_inputs_are_of_the_pool_and_none_is_there_twice(one, drawn):
    numbers = pool(drawn)
    count = 2 if one.handed else 12
    for found in inputs(one, 5, count, range(count)):
        assert torch.isin(found, numbers).all()
        rare = len(numbers) - len(numbers.unique())
        assert len(found) - len(found.unique()) <= rare


def test_two_processes_are_given_the_same_inputs(both, drawn):
    for one in both:
        one.open(drawn)
    found = [inputs(one, 7, 9, (0, 4, 8)) for one in both]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_lay_side_by_side_in_one_invocation_does_not_in_the_next(one, drawn):
    first, second = inputs(one, 3, 2, (0, 1))
    assert not torch.equal(first, second)
    places = torch.argsort(pool(drawn))[torch.searchsorted(pool(drawn).sort().values, second)]
    most = max(len(second) // 16, 2)  # of its neighbours: pieces of 128 bytes hold 32 numbers
    assert int((places.diff() != 1).sum()) <= most
    assert len(second) <= 64 or int((places.diff() != 1).sum()) >= len(second) // 64


def test_every_output_is_kept_until_it_is_asked_for(one, drawn, monkeypatch):
    assert one.most > 8
    monkeypatch.setattr(candidates, "SLOTS_BYTES", 1)
    one.open(drawn)
    assert one.most == candidates.FEWEST_SETS or one.most == one.sets
    assert one.run(1, one.most).code == protocol.FINE
    if one.handed is None:
        assert "cannot be kept" in one.run(1, one.most + 1).text
        return
    with pytest.raises(RuntimeError, match="more invocations than sets of inputs"):
        one.run(1, one.most + 1)


TURNED = definition("turned", {"x": of("m n")}, {"y": of("n m")}, "x.T.contiguous()")
VIEWS = [(TURNED, "turned", "turned_in_a_row"), (COPY, "negated_view", "negated"), (COPY, "padded", "copied")]


@pytest.mark.parametrize(("given", "view", "whole"), VIEWS, ids=["transposed", "negated", "padded"])
def test_what_a_view_leaves_to_do_is_in_its_time(started, given, view, whole):
    """And not between invocations, where it would look like a clock that lies."""
    with open_input_pool(given, workload(given, "w", 60_000), None, None) as made:
        viewed, done = started(view), started(whole)
        between, usual = clocked(viewed, made), clocked(done, made)
    assert min(viewed.times_ns(12)) > min(done.times_ns(12)) / 2
    assert between < 1.7 * usual
    assert torch.equal(viewed.outputs(3)[0], done.outputs(3)[0])


def clocked(one, made):
    """Nanoseconds between twelve invocations of the same inputs, in the quickest of a few such runs."""
    one.open(made)
    found = [one.run(7, 12, keep=[3]) for _ in range(15)]
    assert all(answer.code == protocol.FINE for answer in [*found, one.deliver([3])])
    return min(answer.outside_ns for answer in found)


def test_all_but_the_calls_is_done_of_an_empty_batch(started, drawn):
    never = started("called")
    never.open(drawn)
    assert never.run(7, 3, keep=[2], empty=True).code == protocol.FINE
    assert never.outputs(2)[0].isnan().all()
    assert "it was called" in never.run(7, 3).text


def test_an_empty_batch_takes_the_driver_as_long_as_one_with_calls(started, drawn):
    one = started("copied")
    one.open(drawn)
    empty, full = (min(one.run(7, one.most // 8, empty=kind).outside_ns for _ in range(15)) for kind in (True, False))
    assert full / 2 < empty < 1.5 * full


def test_small_inputs_are_filled_by_the_driver_and_large_ones_handed_over(both, large):
    both[0].open(large)
    assert both[0].handed is not None
    with open_input_pool(COPY, workload(COPY, "w", 300), None, None) as small:
        both[0].open(small)
        assert both[0].handed is None


def test_an_input_is_the_same_whoever_fills_it(both, large, monkeypatch):
    both[0].open(large)
    monkeypatch.setattr(input_pool, "LEAST_HANDED", 1 << 40)
    both[1].open(large)
    found = [inputs(one, 7, 3, (0, 2)) for one in both]
    assert both[0].handed and not both[1].handed
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_inputs_that_are_handed_over_are_nowhere_before(started, large):
    """Neither they nor what they are made of, in the process, but while it runs."""
    one = started("maps")
    one.open(large)
    assert not memory_of(one, "batch") and not memory_of(one, "inputs")
    assert inputs(one, 7, 2, (0, 1))[1].unique().tolist() == [1]
    assert eventually(lambda: not memory_of(one, "batch"))


def memory_of(one, name):
    return f"memfd:{name}" in Path(f"/proc/{one.pid}/maps").read_text()


def test_a_changed_input_is_told_by_the_judge_itself(started, large):
    one = started("mutated")
    one.open(large)
    assert one.run(5, 3).code == protocol.FINE
    told = one.deliver([1])
    assert (told.code, told.text) == (protocol.INPUT, "changed its input x")


def test_an_input_that_was_kept_costs_nothing_and_is_worth_nothing(started, large):
    one = started("earlier")
    one.open(large)
    first, second = (inputs(one, seed, 1, (0,))[0] for seed in (1, 2))
    assert first.any() and one.run(3, 1).code == protocol.FINE
    assert not torch.equal(first, second)


def test_the_memory_of_a_batch_is_given_back(both, large):
    before = len(os.listdir("/proc/self/fd"))
    both[0].open(large)
    for seed in range(5):
        assert both[0].run(seed, 3).code == protocol.FINE
    held = len(os.listdir("/proc/self/fd"))
    both[0].forget()
    assert held <= before + 2 and len(os.listdir("/proc/self/fd")) <= before

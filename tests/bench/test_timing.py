"""Times by the judge's own clock: how long batches are, what is compared of them, and what a stopwatch says."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.bench.judge.candidate import MOST_WAYS, Ran, fresh_seed
from kcap.bench.judge.driver import protocol
from kcap.bench.judge.driver.device import Gpu
from kcap.bench.judge.timing import (
    BATCH_NS,
    CHOSEN,
    FEWEST,
    FEWEST_OF_REFERENCE,
    GPU_BATCH_NS,
    GPU_PART,
    LONG_ENOUGH,
    MOST_ON_GPU,
    WAY_SHARE,
    Batches,
    guess_count,
    size_batches,
    time_both,
)
from kcap.bench.judge.verdict import Rejected

FINE = protocol.Report(protocol.FINE)


class Played:
    """A candidate whose invocations take `each` nanoseconds, and the way to it and back `way`."""

    def __init__(self, each, way=100_000, most=8192, code=protocol.FINE):
        self.each, self.way, self.most, self.code = each, way, most, code
        self.limits, self.ran, self.sets = SimpleNamespace(gpu=None), [], 100
        self.copied, self.ways, self.destination = [], deque(maxlen=MOST_WAYS), False

    def open(self, drawn, sets=3):
        self.sets = sets

    def nothing(self, chosen=0):
        self.copied.append(chosen)
        return self.way

    def run(self, numbers, seed=None, upcast=0, chosen=0):
        count, seed = len(numbers), fresh_seed() if seed is None else seed
        assert numbers == range(count) and count <= self.sets
        self.ran.append((seed, count))
        outputs = {number: [] for number in random.sample(numbers, min(chosen, count))}
        report = protocol.Report(self.code, text="it said so")
        return Ran(report, self.way + count * self.each, seed, outputs)


@given(st.floats(50, 1e8), st.floats(20_000, 1e6), st.integers(1, 8192))
def test_batches_last_long_enough_as_far_as_memory_goes(each, way, most):
    played = Played(each, way, max(most, 3))
    made = size_batches(played, SimpleNamespace(bytes=64))
    lasts = way + made.count * each
    assert lasts >= LONG_ENOUGH * max(BATCH_NS, way / WAY_SHARE) or made.count == played.most
    assert made.count == 3 or lasts < 3 * max(BATCH_NS, way / WAY_SHARE)
    assert len(played.ran) < 20 and played.sets >= made.count


@given(st.floats(50, 1e8), st.floats(50, 1e8), st.integers(1, 8192), st.integers(3, 8192))
def test_a_guess_of_their_length_changes_what_it_takes_to_find_it_alone(each, way, most, guess):
    found = [size_batches(Played(each, way, max(most, 3)), SimpleNamespace(bytes=64), count=n) for n in (3, guess)]
    lasts = [way + made.count * each for made in found]
    assert made_of_few(*found) or max(lasts) <= 1.3 * min(lasts) + each


def made_of_few(*batches):
    return all(made.count < 10 for made in batches)


def test_what_was_known_of_them_is_not_tried_again_and_what_is_right_is_told():
    played = Played(10_000)
    made = size_batches(played, SimpleNamespace(bytes=64), count=20, sure=True)
    assert made.count == 20 and not played.ran
    made.take()
    assert not made.long_enough and made.right_count * 15_000 == pytest.approx(5e6, rel=0.01)
    longer = size_batches(played, SimpleNamespace(bytes=64), count=made.right_count, sure=True)
    longer.take()
    assert longer.long_enough


def test_on_a_gpu_batches_are_long_enough_where_no_more_fit_into_its_memory_or_a_batch():
    """Else a short kernel, of which a graph holds too few, would be timed again and again."""
    drawn = SimpleNamespace(bytes=2 << 20, results=[SimpleNamespace(bytes=1 << 20)])
    fit = int(GPU_PART * (1 << 10))  # inputs drawn, in two arenas and as many outputs elsewhere: of 1 MiB each
    for memory, destination, count in (
        (1 << 40, False, MOST_ON_GPU),
        (1 << 30, False, fit // 5),
        (1 << 30, True, fit // 6),
    ):
        played = Played(1_000, way=1_250_000)
        played.limits.gpu, played.destination = Gpu(l2=1, memory=memory), destination
        made = size_batches(played, drawn)
        made.take()
        assert made.count == count < played.most and made.long_enough


def test_one_disturbed_moment_says_nothing_of_the_way_and_one_that_lasts_does():
    played, drawn = Played(1_000, way=60_000), SimpleNamespace(bytes=64)
    assert [size_batches(played, drawn).way_ns for _ in range(2)] == [60_000, 60_000]
    usual, moments = played.nothing, iter([300_000, 300_000])
    played.nothing = lambda chosen=0: next(moments, usual())
    assert size_batches(played, drawn).way_ns == 60_000
    played.way = 300_000
    assert size_batches(played, drawn).way_ns == 300_000
    played.way = 60_000
    assert [size_batches(played, drawn).way_ns for _ in range(MOST_WAYS)][-1] == 60_000


def test_on_a_gpu_batches_are_longer_and_the_way_holds_the_copies_of_what_is_compared():
    played = Played(10_000)
    played.limits.gpu = Gpu(l2=1, memory=1 << 40)
    made = size_batches(played, SimpleNamespace(bytes=1, results=[]))
    assert made.count * 10_000 >= LONG_ENOUGH * GPU_BATCH_NS > BATCH_NS
    assert {*played.copied} == {CHOSEN}


def test_a_first_run_that_is_nearly_all_way_says_little_of_how_many_fit_into_a_batch():
    theirs = Batches(Played(1_000), 4096, 4096, way_ns=1_250_000)
    assert guess_count(theirs, first_ns=1_253_000) > 2500
    assert guess_count(theirs, first_ns=1_250_000 + 3_000_000) == 20
    assert guess_count(theirs, first_ns=10**9) == 3


def test_nothing_is_taken_off_a_time_and_what_the_way_is_of_it_is_said():
    made = Batches(Played(10_000), 50, 8192, way_ns=100_000)
    assert made.take()[0] == 12.0
    assert made.clocked("limit").way_us == 2.0 and made.clocked("limit").median_us == 12.0


def test_every_batch_that_counts_is_compared_in_what_nobody_knew_of():
    ours, theirs, compared = Batches(Played(1e6), 5, 8192, 0), Batches(Played(2e6), 5, 8192, 0), []
    pair = time_both(ours, theirs, 0.001, compared.append)
    assert len(compared) == len(pair.solution.samples_us) >= FEWEST
    assert [(batch.seed, 5) for batch in compared] == ours.candidate.ran
    assert len({batch.seed for batch in compared}) == len(compared)
    assert all(len(batch.outputs) == 3 and max(batch.outputs) < 5 for batch in compared)
    assert len(pair.reference.samples_us) >= FEWEST_OF_REFERENCE


def test_all_invocations_of_a_batch_are_chosen_in_the_long_run():
    made = Batches(Played(1e6), 6, 8192, 0)
    assert {number for _ in range(200) for number in made.take()[1].outputs} == set(range(6))


def test_a_run_that_comes_to_nothing_has_no_time():
    with pytest.raises(Rejected, match="it said so"):
        Batches(Played(1e6, code=protocol.RAISED), 5, 8192, 0).take()

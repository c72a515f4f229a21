"""The stop rule, on a clock that the test moves."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import count, cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcap.replay.timing.sampling import (
    FEWEST_SAMPLES,
    MIN_NOISE_WINDOW,
    NOISE_EVERY,
    Budget,
    Noise,
    Sampled,
    never_slow,
    sample_until,
)


def run(values: Iterator[float], budget: Budget, tick: float, slow: Callable[[], bool] = never_slow) -> Sampled:
    now = [0.0]

    def take() -> float:
        now[0] += tick
        return next(values)

    return sample_until(take, budget, lambda: now[0], slow)


def noise_of(samples: list[float]) -> Noise:
    noise = Noise()
    for sample in samples:
        noise.add(sample)
    return noise


def test_steady_samples_stop_at_the_least_time() -> None:
    found = run(cycle([10.0, 10.01]), Budget(1.0, 5.0), 0.01)
    assert found.rule == "converged"
    assert 100 <= len(found.samples) <= 102


def test_on_a_gpu_the_median_is_known_better_before_sampling_ends() -> None:
    values = random.Random(1)
    found = {
        device: run(iter(lambda: values.gauss(100, 1), None), Budget.on(device, 0.01), 0.001)
        for device in ("cpu", "cuda:0")
    }
    assert [one.rule for one in found.values()] == ["converged", "converged"]
    for device, precision in (("cpu", 0.005), ("cuda:0", 0.0015)):
        samples = found[device].samples
        assert statistics.stdev(samples) / len(samples) ** 0.5 < precision * statistics.median(samples)
    assert len(found["cuda:0"].samples) > 2 * len(found["cpu"].samples)


@pytest.mark.parametrize(
    ("device", "seconds", "most", "precision"),
    [
        ("cpu", 1.0, 3.0, 0.005),
        ("cuda:1", 1.0, 8.0, 0.0015),
        ("cuda:1", 5.0, 20.0, 0.0015),  # a call has a time limit
        ("cuda:1", 10.0, 30.0, 0.0015),
    ],
)
def test_sampling_has_a_limit_of_several_times_the_seconds_asked_for(
    device: str, seconds: float, most: float, precision: float
) -> None:
    assert Budget.on(device, seconds) == Budget(seconds, most, precision)


def test_noise_above_the_precision_is_sampled_on() -> None:
    alike = cycle([99.0, 101.0])  # of ten samples the mean's error is 0.33 %
    assert len(run(alike, Budget(0.0, 10.0), 0.01).samples) == FEWEST_SAMPLES
    assert len(run(alike, Budget(0.0, 10.0, 0.0015), 0.01).samples) > 40


def test_ten_samples_are_taken_however_slow_they_are() -> None:
    found = run(cycle([10.0]), Budget(0.001, 100.0), 1.0)
    assert (len(found.samples), found.rule) == (FEWEST_SAMPLES, "converged")


def test_noise_stops_at_the_limit_and_every_sample_is_kept() -> None:
    values = [float(1 + i % 7 * 50) for i in range(100)]
    found = run(iter(values), Budget(0.1, 0.5), 0.01)
    assert found.rule == "limit"
    assert found.samples == values[: len(found.samples)]
    assert 50 <= len(found.samples) <= 51


def test_one_sample_longer_than_the_limit_is_enough() -> None:
    found = run(map(float, count()), Budget(0.1, 0.5), 9.0)
    assert (found.samples, found.rule) == ([0.0], "limit")


@pytest.mark.parametrize("samples", [[1.0] * 9, [1.0, 100.0] * 10])
def test_few_or_scattered_samples_have_not_converged(samples: list[float]) -> None:
    assert not noise_of(samples).converged


def test_noise_that_no_longer_changes_stops_long_before_the_limit() -> None:
    """A tenth of spread needs 400 samples for the error alone; that it stays a tenth is plain much earlier."""
    values = random.Random(7)
    found = run(iter(lambda: values.gauss(100, 40), None), Budget(0.1, 1e9), 0.01)
    assert found.rule == "stable"
    assert MIN_NOISE_WINDOW < len(found.samples) < 6400
    assert len(found.samples) % NOISE_EVERY == 0


def test_noise_that_still_grows_is_not_stable() -> None:
    assert not noise_of([100.0 + 1.2**i for i in range(112)]).noise_limited


def test_samples_under_a_slow_clock_are_kept_and_decide_nothing() -> None:
    found = run(cycle([10.0, 99.0]), Budget(0.0, 1e9), 0.01, slow=cycle([False, True]).__next__)
    assert found.rule == "converged"
    assert found.slow == list(range(1, 2 * FEWEST_SAMPLES - 1, 2))
    assert found.samples[:4] == [10.0, 99.0, 10.0, 99.0]


def test_a_clock_that_stays_slow_stops_at_the_limit() -> None:
    found = run(cycle([10.0]), Budget(0.0, 0.5), 0.01, slow=lambda: True)
    assert (found.rule, len(found.slow)) == ("limit", len(found.samples))


@given(st.lists(st.floats(0.001, 1e6, allow_nan=False), min_size=2, max_size=60))
def test_running_numbers_are_those_of_all_samples(samples: list[float]) -> None:
    noise = noise_of(samples)
    assert noise.median == pytest.approx(statistics.median(samples))
    assert noise.mean == pytest.approx(statistics.fmean(samples))
    assert noise.deviation == pytest.approx(statistics.stdev(samples), rel=1e-6, abs=1e-6 * noise.mean)

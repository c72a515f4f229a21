"""The stop rule, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle

import pytest

from kcap.replay.timing.stop import FEWEST, Budget, converged, sample_until


def run(values: Iterator[float], budget: Budget, tick: float) -> tuple[list[float], str]:
    now = [0.0]

    def take() -> float:
        now[0] += tick
        return next(values)

    return sample_until(take, budget, lambda: now[0])


def test_steady_samples_stop_at_the_least_time() -> None:
    samples, rule = run(cycle([10.0, 10.01]), Budget(1.0, 5.0), 0.01)
    assert rule == "converged"
    assert 100 <= len(samples) <= 102


def test_ten_samples_are_taken_however_slow_they_are() -> None:
    samples, rule = run(cycle([10.0]), Budget(0.001, 100.0), 1.0)
    assert (len(samples), rule) == (FEWEST, "converged")


def test_noise_stops_at_the_limit_and_every_sample_is_kept() -> None:
    values = [float(1 + i % 7 * 50) for i in range(100)]
    samples, rule = run(iter(values), Budget(0.1, 0.5), 0.01)
    assert rule == "limit"
    assert samples == values[: len(samples)]
    assert 50 <= len(samples) <= 51


def test_one_sample_longer_than_the_limit_is_enough() -> None:
    samples, rule = run(map(float, count()), Budget(0.1, 0.5), 9.0)
    assert (samples, rule) == ([0.0], "limit")


@pytest.mark.parametrize("samples", [[1.0] * 9, [1.0, 100.0] * 10])
def test_few_or_scattered_samples_have_not_converged(samples: list[float]) -> None:
    assert not converged(samples)

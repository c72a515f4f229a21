"""The rests before samples, on a GPU whose clock and time the test moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kcap.replay.timing import device
from kcap.replay.timing.device import MAX_COOL_DOWN_S, MAX_FACTOR, CoolDown


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_highest_clock", {})


def rests(clocks: Sequence[tuple[int, int] | None], work: float = 0.001) -> list[float]:
    """The rest after each sample of `work` seconds, where the clock then reads `clocks`."""
    slept: list[float] = []
    readings, time = iter(clocks), [0.0]
    one = CoolDown("cuda:0", lambda _: next(readings), lambda: time[0], slept.append)
    taken = []
    one.wait()
    for _ in clocks:
        time[0] += work
        one.wait()
        taken.append(slept.pop() if slept else 0.0)
    return taken


def test_a_gpu_at_its_full_clock_rests_as_long_as_it_works() -> None:
    assert rests([(1980, 1980), (1965, 1980), (1980, 1980), None]) == pytest.approx([0.001] * 4)


def test_rests_grow_while_the_clock_is_held_down_and_stay() -> None:
    found = rests([(1980, 1980), (1605, 1980), (1605, 1980), (1980, 1980), *[(1605, 1980)] * 4])
    assert found == pytest.approx([0.001 * factor for factor in (1, 2, 4, 4, 8, MAX_FACTOR, MAX_FACTOR, MAX_FACTOR)])


def test_a_gpu_that_never_reaches_its_highest_clock_is_held_to_what_was_seen() -> None:
    assert rests([(2550, 3105), (2560, 3105), (2400, 3105)]) == pytest.approx([0.001, 0.001, 0.002])


def test_no_rest_is_longer_than_half_a_second() -> None:
    assert rests([(1980, 1980), (1980, 1980)], work=10.0) == [MAX_COOL_DOWN_S] * 2

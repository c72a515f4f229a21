"""The watch on the SM clock, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kcap.replay.timing import device
from kcap.replay.timing.device import WATCH_PERIOD_S, ClockWatch
from kcap.system import nvml


def watch(readings: Iterator[tuple[int, int] | None], times: Callable[[], float]) -> ClockWatch:
    return ClockWatch("cuda:0", lambda device: next(readings), times)


def test_a_clock_below_three_quarters_of_its_highest_is_slow() -> None:
    readings = iter([(1980, 1980), (1484, 1980), (1486, 1980), None])
    one = watch(readings, iter([WATCH_PERIOD_S * n for n in range(9)]).__next__)
    assert [one.slow() for _ in range(4)] == [False, True, False, False]


def test_it_is_asked_no_more_often_than_it_can_change() -> None:
    asked: list[str] = []

    def read(device: str) -> tuple[int, int]:
        asked.append(device)
        return 100, 1980

    times = iter([0.0, WATCH_PERIOD_S / 4, WATCH_PERIOD_S / 2, WATCH_PERIOD_S])
    one = ClockWatch("cuda:1", read, times.__next__)
    assert [one.slow() for _ in range(4)] == [True] * 4
    assert asked == ["cuda:1", "cuda:1"]


def test_the_hosts_clock_has_none() -> None:
    assert device.read_clocks("cpu") is None


class Library:
    """NVML that answers a clock and notes how often it was asked for the highest one."""

    def __init__(self, failing: bool = False) -> None:
        self.failing = failing
        self.asked = 0

    def nvmlDeviceGetClockInfo(self, handle, which, answer) -> int:
        answer._obj.value = 700 + which
        return int(self.failing)

    def nvmlDeviceGetMaxClockInfo(self, handle, which, answer) -> int:
        self.asked += 1
        answer._obj.value = 1980
        return 0


def test_the_highest_clock_is_asked_once(monkeypatch) -> None:
    library = Library()
    monkeypatch.setattr(nvml, "opened", lambda device: (library, None))
    nvml.highest_sm.cache_clear()
    assert [nvml.sm_clock("cuda:7") for _ in range(3)] == [(701, 1980)] * 3
    assert library.asked == 1
    library.failing = True
    assert nvml.sm_clock("cuda:7") is None
    nvml.highest_sm.cache_clear()

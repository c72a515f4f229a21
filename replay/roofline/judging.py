"""Measurements held against the roofline: how far each is above its floor, and that none is below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kcap.errors import KcapError
from kcap.replay.roofline import stored
from kcap.replay.roofline.ceilings import Ceilings, width
from kcap.replay.roofline.floor import floor_us
from kcap.schemas.families.cost import Cost
from kcap.schemas.measurement import LeastWork, Measurement, Roofline

IMPOSSIBLE = "below the machine's floor"
MACHINE = ("device", "device_name", "driver", "torch", "threads")
Find = Callable[[Mapping[str, Any]], Ceilings]


def work(cost: Cost | None, stays: int) -> dict[str, Any] | None:
    """What a Measurement says of `cost`; `stays`: bytes of the inputs that do not rotate, which the cache may hold."""
    if cost is None:
        return None
    fresh = max(cost.read - stays, 0)
    return LeastWork(moved=cost.bytes, read=cost.read, fresh=fresh, flops=cost.flops, dtype=cost.dtype).model_dump()


class Rooflines:
    """Judges the Measurements of one run. Ceilings are found when they are first needed.

    A time below the floor is refused only once the ceilings were measured again: the machine may have been busy when
    they were. `unknown`: why there is no roofline.
    """

    def __init__(self, find: Find = stored.ceilings, again: Find = stored.raised) -> None:
        self.find, self.again = find, again
        self.found: dict[tuple[Any, ...], Ceilings] = {}
        self.sure: set[tuple[Any, ...]] = set()
        self.unknown = ""

    def judge(self, one: Measurement) -> Measurement:
        """`one` with its Roofline; failed, without times, if it is below it; as it is where nothing is known."""
        if self.unknown or not judgeable(one):
            return one
        machine = {name: getattr(one, name) for name in MACHINE}
        key = tuple(machine.values())
        try:
            if key not in self.found:
                self.found[key] = self.find(machine)
            if below(one, self.found[key]) and key not in self.sure:
                self.found[key] = self.again(machine)
                self.sure.add(key)
        except KcapError as error:
            self.unknown = str(error)
            return one
        return judged(one, self.found[key])

    def as_json(self) -> list[dict[str, Any]]:
        """The ceilings that were used."""
        return [ceilings.model_dump() for ceilings in self.found.values()]

    def lines(self) -> Iterator[str]:
        """The ceilings in words, or why there are none."""
        for ceilings in self.found.values():
            yield f"× floor is of {ceilings.device}'s measured ceilings: {summary(ceilings)}"
        if self.unknown:
            yield f"no floors: {self.unknown}"


def summary(ceilings: Ceilings) -> str:
    """`4,310 GB/s of memory, 790 TFLOP/s bfloat16`: its memory, and its fastest arithmetic but float8 and int8."""
    rates = [(rate, name) for name, rate in ceilings.tflop_s.items() if width(name) >= 16]
    fastest = [f"{rate:.3g} TFLOP/s {name}" for rate, name in sorted(rates)[-1:]]
    return ", ".join([f"{ceilings.memory_gb_s:,.0f} GB/s of memory", *fastest])


def judgeable(one: Measurement) -> bool:
    return one.status == "ok" and one.work is not None and one.median_us is not None and one.method != "none"


def below(one: Measurement, ceilings: Ceilings) -> bool:
    return one.median_us is not None and one.median_us < floor_of(one, ceilings)


def floor_of(one: Measurement, ceilings: Ceilings) -> float:
    """Microseconds. What the host's clock timed was in the CPU's caches."""
    if one.work is None:
        return 0.0
    least = one.work
    cost = Cost(least.moved, least.read, least.flops, least.dtype)
    state = "warm" if one.method == "host" or one.cache is None else one.cache
    once = one.input_sets is None or one.input_sets >= one.n  # each set once in a sample, and before it a sweep
    return floor_us(cost, ceilings, state, None if once else one.input_sets, least.fresh)


def judged(one: Measurement, ceilings: Ceilings) -> Measurement:
    """`one`, of which judgeable holds, held against `ceilings`."""
    floor, median, least = floor_of(one, ceilings), one.median_us or 0.0, one.work
    if not floor or least is None:
        return one
    if median < floor:
        reason = (
            f"{IMPOSSIBLE} ({median:.3g} µs; {floor:.3g} µs for {least.moved:,} bytes and {least.flops:,} FLOPs):"
            " the clock or the inputs are wrong"
        )
        nothing = dict.fromkeys(("median_us", "q1_us", "q3_us"))
        return one.model_copy(update={"status": "failed", "reason": reason, **nothing})
    achieved = Roofline(
        us=floor, times=median / floor, gb_s=least.moved / median / 1e3, tflop_s=least.flops / median / 1e6
    )
    return one.model_copy(update={"roofline": achieved})

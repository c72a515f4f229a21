"""The time that a kernel cannot go below on a machine, and measurements held against it.

A floor is what a kernel must move, or compute, at the machine's ceilings, and rather too low than too high. Ceilings
are measured, so that a better kernel than those that measured them may beat them: MARGINS says by how much. Of a
working set half may stay in a nearer cache. What is written may stay in the cache even where inputs rotate (`cold`,
`serving`), for the outputs of all invocations can lie in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kcap.errors import KcapError
from kcap.replay.roofline import ceilings
from kcap.replay.roofline.ceilings import Ceilings, dtype_width
from kcap.replay.timing.rotation import COLD_FACTOR
from kcap.schemas.derive.cost import Cost
from kcap.schemas.results.measurement import Cache, Measurement, Roofline

# By the kind of device: of bandwidth and of arithmetic. Sustained products of random matrices lower a GPU's clock by a
# tenth or two, short ones do not; on a CPU torch's own loops are further from what a core can do.
MARGINS = {"cuda": (1.15, 1.25), "cpu": (1.5, 1.5)}


def floor_us(
    cost: Cost, ceilings: Ceilings, cache: Cache = "warm", sets: int | None = None, fresh: int | None = None
) -> float:
    """Microseconds of one invocation, at least; 0 where nothing is known of its cost.

    `cache`: where its inputs lie. Unless that is `warm`, `fresh` bytes of them rotate (None: in `cold` all that is
    read; in `serving` nobody knows, and so none), over so many `sets` (None: as many as the state promises).
    """
    of_bytes, of_flops = MARGINS["cuda" if ceilings.device.startswith("cuda") else "cpu"]
    if fresh is None:
        fresh = cost.read if cache == "cold" else 0
    moving = max(_warm_us(cost, ceilings), 0.0 if cache == "warm" else _rotating_us(fresh, ceilings, sets))
    return max(moving / of_bytes, _computing_us(cost, ceilings) / of_flops)


def _warm_us(cost: Cost, ceilings: Ceilings) -> float:
    """What is written may be what was read, in place: the working set is half of the bytes at least."""
    return cost.bytes / ceilings.bandwidth(cost.bytes / 2) / 1e3


def _rotating_us(fresh: int, ceilings: Ceilings, sets: int | None) -> float:
    over = max(COLD_FACTOR * ceilings.cache_bytes, fresh) if sets is None else sets * fresh
    return fresh / ceilings.bandwidth(over) / 1e3


def _computing_us(cost: Cost, ceilings: Ceilings) -> float:
    peak = ceilings.peak(cost.dtype)
    return cost.flops / peak / 1e6 if peak else 0.0


IMPOSSIBLE = "below the machine's floor"


MACHINE_FIELDS = ("device", "device_name", "driver", "torch", "threads")


FindCeilings = Callable[[Mapping[str, Any]], Ceilings]


class Rooflines:
    """Judges the Measurements of one run. Ceilings are found when they are first needed.

    A time below the floor is refused only once the ceilings were measured again: the machine may have been busy when
    they were. `unknown`: why there is no roofline.
    """

    def __init__(
        self, find: FindCeilings = ceilings.kept_ceilings, again: FindCeilings = ceilings.raised_ceilings
    ) -> None:
        self.find, self.again = find, again
        self.found: dict[tuple[Any, ...], Ceilings] = {}
        self.sure: set[tuple[Any, ...]] = set()
        self.unknown = ""

    def judge(self, measurement: Measurement) -> Measurement:
        """`one` with its Roofline; failed, without times, if it is below it; as it is where nothing is known."""
        if self.unknown or not has_floor(measurement):
            return measurement
        machine = {name: getattr(measurement, name) for name in MACHINE_FIELDS}
        key = tuple(machine.values())
        try:
            if key not in self.found:
                self.found[key] = self.find(machine)
            if is_below_floor(measurement, self.found[key]) and key not in self.sure:
                self.found[key] = self.again(machine)
                self.sure.add(key)
        except KcapError as error:
            self.unknown = str(error)
            return measurement
        return held_against_floor(measurement, self.found[key])

    def as_json(self) -> list[dict[str, Any]]:
        """The ceilings that were used."""
        return [ceilings.model_dump() for ceilings in self.found.values()]

    def lines(self) -> Iterator[str]:
        """The ceilings in words, or why there are none."""
        for used in self.found.values():
            yield f"× floor is of {used.device}'s measured ceilings: {ceilings_summary(used)}"
        if self.unknown:
            yield f"no floors: {self.unknown}"


def ceilings_summary(ceilings: Ceilings) -> str:
    """`4,310 GB/s of memory, 790 TFLOP/s bfloat16`: its memory, and its fastest arithmetic but float8 and int8."""
    rates = [(rate, name) for name, rate in ceilings.tflop_s.items() if dtype_width(name) >= 16]
    fastest = [f"{rate:.3g} TFLOP/s {name}" for rate, name in sorted(rates)[-1:]]
    return ", ".join([f"{ceilings.memory_gb_s:,.0f} GB/s of memory", *fastest])


def has_floor(measurement: Measurement) -> bool:
    return (
        measurement.status == "ok"
        and measurement.work is not None
        and measurement.median_us is not None
        and measurement.method != "none"
    )


def is_below_floor(measurement: Measurement, ceilings: Ceilings) -> bool:
    return measurement.median_us is not None and measurement.median_us < floor_of_measurement(measurement, ceilings)


def floor_of_measurement(measurement: Measurement, ceilings: Ceilings) -> float:
    """Microseconds. What the host's clock timed was in the CPU's caches."""
    if measurement.work is None:
        return 0.0
    work = measurement.work
    cost = Cost(work.moved, work.read, work.flops, work.dtype)
    state = "warm" if measurement.method == "host" or measurement.cache is None else measurement.cache
    swept = (
        measurement.input_sets is None or measurement.input_sets >= measurement.n
    )  # each set once in a sample, and before it a sweep
    return floor_us(cost, ceilings, state, None if swept else measurement.input_sets, work.fresh)


def held_against_floor(measurement: Measurement, ceilings: Ceilings) -> Measurement:
    """`one`, of which judgeable holds, held against `ceilings`."""
    floor, median, work = floor_of_measurement(measurement, ceilings), measurement.median_us or 0.0, measurement.work
    if not floor or work is None:
        return measurement
    if median < floor:
        reason = (
            f"{IMPOSSIBLE} ({median:.3g} µs; {floor:.3g} µs for {work.moved:,} bytes and {work.flops:,} FLOPs):"
            " the clock or the inputs are wrong"
        )
        nothing = dict.fromkeys(("median_us", "q1_us", "q3_us"))
        return measurement.model_copy(update={"status": "failed", "reason": reason, **nothing})
    roofline = Roofline(
        us=floor, times=median / floor, gb_s=work.moved / median / 1e3, tflop_s=work.flops / median / 1e6
    )
    return measurement.model_copy(update={"roofline": roofline})

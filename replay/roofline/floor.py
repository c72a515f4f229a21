"""The time that no kernel can be below on a machine, and measurements compared with it.

A floor is the time to move the bytes, or compute the FLOPs, of a kernel at the machine's ceilings; it errs on the low
side. Ceilings are measured, so a better kernel than those that measured them may beat them, by MARGINS at most. Half of
a working set may stay in a nearer cache. What is written may stay in the cache even where inputs rotate (`cold`,
`serving`), for the outputs of all invocations may share one address.
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

# By the type of device: for bandwidth and for arithmetic. Sustained products of random matrices lower a GPU's clock by
# 10 to 20 %, short ones do not; on a CPU torch's own loops are further from what a core can do.
MARGINS = {"cuda": (1.15, 1.25), "cpu": (1.5, 1.5)}


def floor_us(
    cost: Cost, ceilings: Ceilings, cache: Cache = "warm", sets: int | None = None, fresh: int | None = None
) -> float:
    """The microseconds that one invocation takes at least; 0 where its cost is unknown.

    `cache`: the state of its inputs. Unless that is `warm`, `fresh` bytes of them rotate (None: in `cold` all that is
    read; in `serving` it is unknown, so none), over so many `sets` (None: as many as the state requires).
    """
    return max(floor_parts(cost, ceilings, cache, sets, fresh))


def floor_parts(
    cost: Cost, ceilings: Ceilings, cache: Cache = "warm", sets: int | None = None, fresh: int | None = None
) -> tuple[float, float]:
    """The floor of the bytes alone and of the FLOPs alone, in microseconds: the larger one is what bounds a kernel."""
    of_bytes, of_flops = MARGINS["cuda" if ceilings.device.startswith("cuda") else "cpu"]
    if fresh is None:
        fresh = cost.read if cache == "cold" else 0
    moving = max(_warm_us(cost, ceilings), 0.0 if cache == "warm" else _rotating_us(fresh, ceilings, sets))
    return moving / of_bytes, _computing_us(cost, ceilings) / of_flops


def _warm_us(cost: Cost, ceilings: Ceilings) -> float:
    """Outputs may overwrite inputs in place: the working set is at least half of the bytes."""
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
    """Compares the Measurements of one run with their floors. Ceilings are looked up when they are first needed.

    A time below the floor is refused only after the ceilings were measured again: the machine may have been busy when
    they were first measured. `unknown`: why there are no floors.
    """

    def __init__(
        self, find: FindCeilings = ceilings.kept_ceilings, measure_again: FindCeilings = ceilings.raised_ceilings
    ) -> None:
        self.find, self.measure_again = find, measure_again
        self.ceilings: dict[tuple[Any, ...], Ceilings] = {}  # by machine
        self.measured_twice: set[tuple[Any, ...]] = set()
        self.unknown = ""

    def judge(self, measurement: Measurement) -> Measurement:
        """`measurement` with its Roofline; failed and without times if it is below the floor."""
        if self.unknown or not has_floor(measurement):
            return measurement
        machine = {name: getattr(measurement, name) for name in MACHINE_FIELDS}
        key = tuple(machine.values())
        try:
            if key not in self.ceilings:
                self.ceilings[key] = self.find(machine)
            if is_below_floor(measurement, self.ceilings[key]) and key not in self.measured_twice:
                self.ceilings[key] = self.measure_again(machine)
                self.measured_twice.add(key)
        except KcapError as error:
            self.unknown = str(error)
            return measurement
        return with_roofline(measurement, self.ceilings[key])

    def as_json(self) -> list[dict[str, Any]]:
        """The ceilings that were used."""
        return [ceilings.model_dump() for ceilings in self.ceilings.values()]

    def lines(self) -> Iterator[str]:
        """The ceilings in words, or why there are none."""
        for used in self.ceilings.values():
            yield f"× floor: the time over the least that {used.device} could take, at {ceilings_summary(used)}"
        if self.unknown:
            yield f"no floors: {self.unknown}"


def ceilings_summary(ceilings: Ceilings) -> str:
    """`4,310 GB/s of memory, 790 TFLOP/s bfloat16`: the memory, and the fastest arithmetic except float8 and int8."""
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
    """Its floor in microseconds. What the host's clock timed was in the CPU's caches."""
    if measurement.work is None:
        return 0.0
    work = measurement.work
    cost = Cost(work.moved, work.read, work.flops, work.dtype)
    state = "warm" if measurement.method == "host" or measurement.cache is None else measurement.cache
    # Where a sample uses each set once, a sweep comes before it
    swept = measurement.input_sets is None or measurement.input_sets >= measurement.n
    return floor_us(cost, ceilings, state, None if swept else measurement.input_sets, work.fresh)


def with_roofline(measurement: Measurement, ceilings: Ceilings) -> Measurement:
    """`measurement`, which `has_floor`, compared with `ceilings`."""
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

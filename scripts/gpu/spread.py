"""How far the runs of `kcap replay` differ: of every kernel, the spread of its medians, judged by how long it lasts.

The spread is the highest median less the lowest, over the middle one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marks import mark

from kcap.schemas.recording.values import TorchConstant, tensors
from kcap.schemas.results.measurement import Measurement

WORST = 15  # rows
COPYING = frozenset({"aten::copy_", "aten::_to_copy", "aten::to"})


@dataclass(frozen=True)
class Class:
    """Kernels of at least `least` µs and of no longer class; `bound`: the spread allowed, None: it is only told."""

    name: str
    least: float
    bound: float | None


CLASSES = (Class("over 5 µs", 5.0, 0.01), Class("2 to 5 µs", 2.0, 0.03), Class("under 2 µs", 0.0, None))
COPIES = Class("copies between host and GPU", 0.0, None)  # no kernels: they last as the bus between them lets them


@dataclass(frozen=True)
class Kernel:
    """One Call on one Sample (or Workload): its median in each run that timed it, in µs. `copy`: by the bus."""

    name: str
    method: str
    medians: tuple[float, ...]
    copy: bool = False

    @property
    def us(self) -> float:
        return statistics.median(self.medians)

    @property
    def spread(self) -> float:
        return (max(self.medians) - min(self.medians)) / self.us

    @property
    def of(self) -> Class:
        return COPIES if self.copy else next(one for one in CLASSES if self.us >= one.least)

    @property
    def judged(self) -> bool:
        return self.of.bound is not None

    @property
    def holds(self) -> bool:
        return self.of.bound is None or self.spread <= self.of.bound


def kernels(runs: Iterable[Iterable[Measurement]]) -> tuple[list[Kernel], list[Kernel]]:
    """Those that every run timed on the GPU, and those that some run lacks."""
    found = [{place(one): one for one in run if one.median_us and one.method in ("graph", "events")} for run in runs]
    keys = dict.fromkeys(key for run in found for key in run)
    timed = [[run[key] for run in found if key in run] for key in keys]
    common = [_kernel(ones) for ones in timed if len(ones) == len(found)]
    return common, [_kernel(ones) for ones in timed if len(ones) < len(found)]


def place(one: Measurement) -> tuple[int | str | None, int | None]:
    return (one.workload if one.call is None else one.call), one.sample


def _kernel(ones: list[Measurement]) -> Kernel:
    first = ones[0]
    name = f"{first.operator} (call {first.call}, sample {first.sample})"
    medians = tuple(one.median_us or 0.0 for one in ones)
    return Kernel(name, f"{first.method}, {first.cache}", medians, is_copy(first))


def is_copy(one: Measurement) -> bool:
    """Whether it copies from the host to the GPU, or back."""
    values = [argument.value for argument in one.args]
    wanted = {value.name for value in values if isinstance(value, TorchConstant) and value.kind == "device"}
    devices = wanted | {spec.device for _, spec in tensors(values)}
    return one.operator.split(".")[0] in COPYING and len({device.split(":")[0] for device in devices}) > 1


def worst(found: list[Kernel]) -> list[str]:
    """The kernels that differ most, one a line."""
    rows = sorted(found, key=lambda one: (one.holds, -one.spread))[:WORST]
    return [f"{one.spread:7.2%}  {one.us:9.2f} µs  {one.method:16} {one.name}" for one in rows]


def table(found: list[Kernel], lacking: list[Kernel]) -> list[str]:
    """A line for each class, one for what some run lacks, and one where nothing with a bound was compared."""
    lines = [
        _line(one, those) for one in (*CLASSES, COPIES) if (those := [kernel for kernel in found if kernel.of == one])
    ]
    if not any(kernel.judged for kernel in found):
        lines.append(f"{mark(False)} no kernel of {least_judged():g} µs or more was compared")
    long = [kernel for kernel in lacking if kernel.judged]
    which = "".join(f"; {kernel.name}" for kernel in long[:3])
    told = f"{len(lacking)}, of {least_judged():g} µs or more {len(long)}{which}"
    return [*lines, f"{mark(not long)} kernels that some run lacks: {told}"]


def _line(one: Class, those: Sequence[Kernel]) -> str:
    inside = sum(kernel.holds for kernel in those)
    bound = f"within {one.bound:.0%}: {inside} of {len(those)}" if one.bound else str(len(those))
    most = max(kernel.spread for kernel in those)
    middle = statistics.median(kernel.spread for kernel in those)
    return f"{mark(inside == len(those))} {one.name}: {bound}, worst {most:.2%}, median {middle:.2%}"


def least_judged() -> float:
    """Microseconds."""
    return min(one.least for one in CLASSES if one.bound is not None)

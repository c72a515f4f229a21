"""What Calls cost where no GPU time was measured: an estimate from the bytes they move and the FLOPs they compute."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kcap.schemas.recording.dtypes import BY_NAME
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.records import Call, Sample
from kcap.schemas.recording.values import TensorSpec, TorchConstant, storage_bytes, tensors

if TYPE_CHECKING:
    from kcap.schemas.derive.cost import Cost
    from kcap.schemas.results.measurement import Measurement


@dataclass(frozen=True)
class Rates:
    """Main memory's bandwidth and the arithmetic's rate of one device; `source` says where they come from."""

    memory_gb_s: float
    tflop_s: float
    source: str

    def least_us(self, moved: int, flops: int) -> float:
        """Microseconds to move so many bytes, or to compute so many FLOPs, whichever takes longer."""
        return max(moved / self.memory_gb_s / 1e3, flops / self.tflop_s / 1e6)

    def __str__(self) -> str:
        return f"{self.memory_gb_s:,.0f} GB/s and {self.tflop_s:,.3g} TFLOP/s, {self.source}"


ALMOST = 0.99  # of a rate: what a kernel has that is bound by it
TYPICAL_GPU = Rates(3000, 700, "typical of a data-center GPU")
TYPICAL_CPU = Rates(50, 1, "typical of a CPU")


def typical_rates(recording: Recording) -> Rates:
    """Rates of the recorded kind of device, where nobody measured the very one."""
    on_gpu = any(spec.device.startswith("cuda") for call in recording.calls for spec in _specs(call))
    return TYPICAL_GPU if on_gpu else TYPICAL_CPU


def rates_of_floors(measurements: Iterable[Measurement], source: str) -> Rates | None:
    """The rates that the floors of `measurements` were reckoned with, of the dtype that most FLOPs are of; None where
    no kernel is bound by arithmetic, or none by memory. Of the latter only those that move most count: what a cache
    holds moves faster. A floor's margin is in them.
    """
    worked = [
        (one.work, one.roofline.us)
        for one in measurements
        if one.work is not None and one.roofline is not None and one.roofline.us
    ]
    flops = Counter[str]()
    for work, _ in worked:
        flops[work.dtype] += work.flops
    usual = max(flops, key=lambda dtype: flops[dtype], default="")
    shown = [
        (work.moved, work.moved / us / 1e3, work.flops / us / 1e6)
        for work, us in worked
        if work.dtype == usual or not work.flops
    ]
    most, peak = (max((row[column] for row in shown), default=0.0) for column in (0, 2))
    large = [(gb_s, tflop_s) for moved, gb_s, tflop_s in shown if moved >= most / 2]
    memory = max((gb_s for gb_s, _ in large), default=0.0)
    by_arithmetic = any(gb_s < ALMOST * memory and tflop_s >= ALMOST * peak for _, gb_s, tflop_s in shown)
    by_memory = any(gb_s >= ALMOST * memory and tflop_s < ALMOST * peak for gb_s, tflop_s in large)
    return Rates(memory, peak, source) if by_arithmetic and by_memory else None


def estimated_times(recording: Recording, rates: Rates) -> Mapping[int, float] | None:
    """Microseconds of all invocations of each kernel (by the Call's id); None without torch, which families need.

    A Call that a family recognizes costs what the family says on one of its Samples. Any other moves each of its
    tensors once, those that its index arguments may point into as far as its other tensors are large.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    times = {}
    for call in recording.kernels():
        times[call.id] = call.total * rates.least_us(
            *bytes_and_flops(call, recording.sample_by_call.get(call.id), recording)
        )
    return times


def bytes_and_flops(call: Call, sample: Sample | None, recording: Recording) -> tuple[int, int]:
    """Of one invocation, by its family or by the sizes of its tensors, whose FLOPs are not known: 0."""
    cost = _family_cost(call, sample, recording)
    return (cost.bytes, cost.flops) if cost and cost.bytes else (moved_bytes(call), 0)


def _family_cost(call: Call, sample: Sample | None, recording: Recording) -> Cost | None:
    """What the Call's family says; None where no family knows it, or a value that it needs was not recorded, or
    without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from kcap.schemas.derive.bound_call import bind_call, invocation_of_bound
    from kcap.schemas.derive.cost import cost_of_instance
    from kcap.schemas.derive.families import REFUSALS, family_of, recognize

    if family_of(call.operator)[1] is None:
        return None
    try:
        kernel = recognize(invocation_of_bound(bind_call(call, sample, None, recording.value), call.launch))
        return cost_of_instance(kernel) if kernel else None
    except REFUSALS:
        return None


def moved_bytes(call: Call) -> int:
    """Bytes of all tensor arguments, each storage once; of the result where there are none but a shape.

    Beside an index tensor (a block table, slots, token ids) the largest tensor may be a cache or a table of which a few
    rows are read: it counts for no more than the others together.
    """
    specs = _specs(call)
    if not specs:
        return _filled_bytes(call)
    sizes = sorted(storage_bytes(specs))
    indexed = any(spec.dtype in ("int32", "int64") and spec.numel for spec in specs)
    if indexed and len(sizes) > 1:
        sizes[-1] = min(sizes[-1], sum(sizes[:-1]))
    return sum(sizes)


def _filled_bytes(call: Call) -> int:
    """Bytes that `aten::zeros` and its like fill: their first argument is the shape of what they return."""
    shape = call.args[0].value if call.args else None
    if call.namespace != "aten" or not isinstance(shape, list):
        return 0
    dtypes = [a.value.name for a in call.args if isinstance(a.value, TorchConstant) and a.value.kind == "dtype"]
    bits = BY_NAME[dtypes[0]].bits if dtypes and dtypes[0] in BY_NAME else 32
    return math.prod(size for size in shape if isinstance(size, int)) * bits // 8


def _specs(call: Call) -> list[TensorSpec]:
    return [spec for _, spec in tensors([argument.value for argument in call.args])]

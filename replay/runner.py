"""Replay one Call on one Sample, inside the worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kcap.replay import environment, memory, rules
from kcap.replay.bind import Bound
from kcap.replay.inputs import Inputs
from kcap.replay.job import SEED
from kcap.replay.layout import Target
from kcap.replay.operators import Operator
from kcap.replay.rebuild import Decided, Rebuilder
from kcap.replay.skip import Skip
from kcap.replay.timing import clocks
from kcap.replay.timing.clock import Size, time_on
from kcap.replay.timing.result import Timing
from kcap.replay.timing.stop import Budget
from kcap.schemas.measurement import SLOWED, Clocks, quartiles
from kcap.schemas.recording import Call, Sample

LIMIT_FACTOR = 3  # sampling may take this many times the seconds asked for, if the median stays uncertain
LEAST_CLOCK = 0.75  # of the highest SM clock


class Runner:
    """Replays Calls on one device. `home` is the device type that they were recorded on.

    `trust`: kernel sources of the Recording in `root` run, whoever made it.
    """

    def __init__(self, device: str, home: str, root: Path | None, trust: bool = False) -> None:
        self.rebuilder = Rebuilder(device, home, root, trust)
        self.target = self.rebuilder.target

    def run(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        """The fields of a Measurement that this replay decides."""
        try:
            return self._time(call, sample, seconds)
        except Exception as error:
            return verdict(error, self.target)

    def _time(self, call: Call, sample: Sample | None, seconds: float) -> dict[str, Any]:
        torch.manual_seed(SEED)
        decided = self.rebuilder.decide(call, sample, cut=True)
        timing = self._clock(decided, self.rebuilder.build(decided), Budget(seconds, LIMIT_FACTOR * seconds))
        timing = replace(timing, notes=[*timing.notes, *decided.operator.notes])
        return report(timing, decided.total, decided.touched, self.target.device)

    def _clock(self, decided: Decided, first: Inputs, budget: Budget) -> Timing:
        operator = decided.operator
        restored = written(operator, decided.bound, decided.rule, self.target)
        size = Size(decided.total, decided.touched)
        clone = partial(self.rebuilder.clone, decided, first)
        return time_on(self.target.device, operator.call, first, clone, size, restored, budget)


def written(operator: Operator, bound: Bound, rule: rules.Rule, target: Target) -> list[memory.Key]:
    """The storages that the operator writes to and that must be restored before it runs again."""
    writes = {a.name for a in operator.schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    keys: set[memory.Key] = set()
    for path, spec in bound.tensors():
        argument = bound.args[int(path.split(".")[0])]
        if (argument.written or argument.name in writes) and argument.name not in rule.harmless:
            keys.add((memory.place(spec.device, target.device, target.home), spec.storage))
    return sorted(keys)


def report(timing: Timing, set_bytes: int, touched: int, device: str) -> dict[str, Any]:
    q1, median, q3 = quartiles(timing.samples_us)
    host = timing.method == "host"
    state = None if host else clocks.read(device)
    return {
        **(environment.host() if host else {}),
        "status": "ok",
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "samples_us": timing.samples_us,
        "n": timing.n,
        "stop": timing.stop,
        "method": timing.method,
        "cache": timing.cache,
        "input_sets": timing.input_sets,
        "bytes": set_bytes,
        "touched": touched,
        "floor_us": timing.floor_us,
        "notes": timing.notes + ([SLOWED] if state and slowed(state) else []),
        "poisoned": timing.spoiled,
        "clocks": state.model_dump() if state else None,
    }


def slowed(state: Clocks) -> bool:
    """Whether power or heat held the GPU's clock well below its highest."""
    return bool(state.sm_mhz and state.sm_max_mhz and state.sm_mhz < LEAST_CLOCK * state.sm_max_mhz)


NO_KERNEL = ("not implemented for", "is not implemented", "Could not run", "not supported on CPU", "not compiled with")
NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")


POISON = ("CUDA error", "device-side assert", "outside graph capture")  # the process can run nothing more on the GPU


def verdict(error: Exception, target: Target) -> dict[str, Any]:
    """Skipped, where this device or torch cannot run the Call at all; failed, where it should have run."""
    text = str(error).strip()
    line = text.splitlines()[0][:200] if text else type(error).__name__
    if isinstance(error, Skip):
        return {"status": "skipped", "reason": line}
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
        return {"status": "skipped", "reason": f"its results do not fit into the memory of {target.device}"}
    if isinstance(error, NotImplementedError) or any(words in line for words in NO_KERNEL):
        return {"status": "skipped", "reason": f"torch has no kernel for it on {target.device} ({line[:120]})"}
    if isinstance(error, RuntimeError) and not target.device.startswith(target.home):
        return {"status": "skipped", "reason": f"recorded on {target.home}, refused on {target.device}: {line}"}
    poisoned = any(words in text for words in POISON)
    return {"status": "failed", "reason": f"{type(error).__name__}: {line}", "poisoned": poisoned}

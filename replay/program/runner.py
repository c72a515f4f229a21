"""Replay one Program, inside the worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.replay.calls.runner import error_fields
from kcap.replay.program.durations import CallDurations
from kcap.replay.program.flow import NOT_SHARED, loses_numbers
from kcap.replay.program.parts import Part, Parts, RestoredStorages
from kcap.replay.program.timing import ProgramTiming, time_on_gpu, time_on_host
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.timing import device
from kcap.replay.timing.sampling import Budget, counted_samples, quartiles
from kcap.schemas.results.measurement import DROPPED

NOTHING_RAN = "none of its kernels can be replayed here"
ON_HOST = "the host's work"


class ProgramRunner:
    """Replays Programs of one Recording with what `rebuilder` makes of their Calls."""

    def __init__(self, rebuilder: Rebuilder) -> None:
        self.rebuilder = rebuilder
        self.target = rebuilder.target

    def run(self, given: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The fields of a ProgramMeasurement that this replay decides; `given` as ProgramJob.request makes it."""
        try:
            return self._run(given, Budget.on(self.target.device, seconds))
        except Exception as error:
            return error_fields(error, self.target)

    def _run(self, given: dict[str, Any], budget: Budget) -> dict[str, Any]:
        known = {int(number): part for number, part in given["parts"].items()}
        gpu = self.target.device.startswith("cuda")
        timed = {number for number, part in known.items() if not gpu or part["method"] in ("graph", "events")}
        order = [number for number in given["order"] if number in timed]
        before = device.read_clocks(self.target.device)
        samples = {number: part["sample"] for number, part in known.items()}
        parts, restore, notes = self._parts(order, samples, gpu)
        order = [number for number in order if number in parts.good]
        calls = [self._other(number, known[number]) for number in known if number not in timed]
        if not order:
            return {
                "status": "skipped",
                "reason": NOTHING_RAN,
                "calls": calls + call_fields(parts.all, CallDurations()),
            }
        if gpu:
            found = time_on_gpu(order, parts, restore, known, budget, self.target.device)
        else:
            found = time_on_host(order, parts.good, restore, budget)
        state = device.read_clocks(self.target.device)
        return {
            **program_fields(found, notes),
            "replayed": len(order)
            + sum(given["order"].count(call["call"]) for call in calls if call["status"] == "ok"),
            "calls": calls + call_fields(parts.all, found.shared),
            "bytes": parts.bytes,
            "clocks_before": before.model_dump() if before else None,
            "clocks": state.model_dump() if state else None,
            "poisoned": found.spoiled or any((part.failed or {}).get("poisoned") for part in parts.all.values()),
        }

    def _parts(
        self, order: list[int], samples: dict[int, int | None], gpu: bool
    ) -> tuple[Parts, RestoredStorages, list[str]]:
        """The Calls ready to run, what puts back what they write to, and notes on both."""
        parts, notes = Parts(self.rebuilder, Counter(order), samples), []
        restore = RestoredStorages(parts.good.values())
        if gpu and loses_numbers(order, parts):
            del parts, restore  # there may be no room for both
            parts, notes = Parts(self.rebuilder, Counter(order), samples, shared=False), [NOT_SHARED]
            restore = RestoredStorages(parts.good.values())
        return parts, restore, notes + restore.notes

    def _other(self, number: int, known: dict[str, Any]) -> dict[str, Any]:
        """A Call that needs no clock: one that launches nothing, or the host's work on a GPU's Recording."""
        if known["method"] == "none":
            return {"call": number, "status": "ok", "us": 0.0}
        return {"call": number, "status": "host", "reason": ON_HOST}


def call_fields(parts: dict[int, Part], shared: CallDurations) -> list[dict[str, Any]]:
    """What the measurement says of each Call."""
    return [
        {"call": number, "sets": len(part.sets), "status": part.failed["status"], "reason": part.failed["reason"]}
        if part.failed
        else {
            "call": number,
            "sets": len(part.sets),
            "us": shared.us.get(number),
            "kernels": [kernel.model_dump() for kernel in shared.kernels.get(number, [])],
        }
        for number, part in parts.items()
    ]


def program_fields(found: ProgramTiming, notes: list[str]) -> dict[str, Any]:
    sampled = found.sampled
    q1, median, q3 = quartiles(counted_samples(sampled.samples, sampled.slow))
    return {
        "status": "ok",
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "samples_us": sampled.samples,
        "slow_samples": sampled.slow,
        "kernel_us": found.shared.total_us,
        "unmatched_us": found.shared.unmatched_us,
        "n": found.n,
        "stop": sampled.rule,
        "method": found.method,
        "cache": "serving",
        "stretches": found.stretches,
        "notes": notes + found.notes + ([f"{len(sampled.slow)} {DROPPED}"] if sampled.slow else []),
    }

"""Replay one Program, in the worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.replay.calls.runner import error_fields
from kcap.replay.group.peers import Alone
from kcap.replay.program.durations import CallDurations
from kcap.replay.program.flow import part_losers
from kcap.replay.program.job import ProgramBody, ProgramPart
from kcap.replay.program.prepared import PreparedCall, PreparedCalls, ProgramSnapshot
from kcap.replay.program.timing import ProgramTiming, time_on_gpu, time_on_host
from kcap.replay.rebuild.rebuild import Rebuilder
from kcap.replay.timing import device
from kcap.replay.timing.sampling import Budget, counted_samples, quartiles
from kcap.schemas.results.measurement import DROPPED

NOTHING_RAN = "none of its kernels can be replayed here"
ON_HOST = "the host's work"
NOT_IN_ALL = "another rank could not prepare it"


class ProgramRunner:
    """Replays Programs of one Recording, whose Calls `rebuilder` rebuilds.

    `peers`: the ranks of a group run one together, each the same Program in its own place.
    """

    def __init__(self, rebuilder: Rebuilder, peers: Alone | None = None) -> None:
        self.rebuilder = rebuilder
        self.target = rebuilder.target
        self.peers = peers or Alone(self.target.device)

    def run(self, program: ProgramBody, seconds: float) -> dict[str, Any]:
        """The fields of a ProgramMeasurement that the replay gives; `seconds`: of sampling."""
        try:
            return self._run(program, Budget.on(self.target.device, seconds))
        except Exception as error:
            return error_fields(error, self.target)

    def _run(self, program: ProgramBody, budget: Budget) -> dict[str, Any]:
        standalone = {int(number): part for number, part in program["parts"].items()}
        gpu = self.target.device.startswith("cuda")
        timed = {number for number, part in standalone.items() if not gpu or part["method"] in ("graph", "events")}
        order = [number for number in program["order"] if number in timed]
        before = device.read_clocks(self.target.device)
        samples = {number: part["sample"] for number, part in standalone.items()}
        parts, restore, notes = self._prepare(order, samples, gpu)
        order = [number for number in order if number in parts.good]
        calls = [untimed_fields(number, part) for number, part in standalone.items() if number not in timed]
        if not order:
            return {
                "status": "skipped",
                "reason": NOTHING_RAN,
                "calls": calls + call_fields(parts.all, CallDurations()),
            }
        if gpu:
            timing = time_on_gpu(order, parts, restore, standalone, budget, self.peers)
        else:
            timing = time_on_host(order, parts.good, restore, budget, self.peers)
        state = device.read_clocks(self.target.device)
        return {
            **program_fields(timing, notes),
            "ranks": self.peers.size if self.peers.size > 1 else None,
            "waited_us": timing.waited_us if self.peers.size > 1 else None,
            "replayed": len(order)
            + sum(program["order"].count(call["call"]) for call in calls if call["status"] == "ok"),
            "calls": calls + call_fields(parts.all, timing.durations),
            "bytes": parts.bytes,
            "clocks_before": before.model_dump() if before else None,
            "clocks": state.model_dump() if state else None,
            "poisoned": timing.poisoned or any((part.failed or {}).get("poisoned") for part in parts.all.values()),
        }

    def _prepare(
        self, order: list[int], samples: dict[int, int | None], gpu: bool
    ) -> tuple[PreparedCalls, ProgramSnapshot, list[str]]:
        """The Calls ready to run, the snapshot that restores what they write to, and notes on both."""
        parts = PreparedCalls(self.rebuilder, Counter(order), samples)
        leave_out_what_others_lack(parts, self.peers)
        if gpu:
            return parts, *part_losers(order, parts, self.peers)
        restore = ProgramSnapshot(parts.good.values())
        return parts, restore, restore.notes


def leave_out_what_others_lack(parts: PreparedCalls, peers: Alone) -> None:
    """A Call that runs in some ranks alone would wait there for the others."""
    lacking = peers.gather([part.failed is not None for part in parts.all.values()]).any(dim=0)
    for part, lacks in zip(parts.all.values(), lacking.tolist(), strict=True):
        if lacks and part.failed is None:
            part.failed, part.sets = {"status": "skipped", "reason": NOT_IN_ALL}, []


def untimed_fields(number: int, part: ProgramPart) -> dict[str, Any]:
    """The fields of a Call that is not timed: it launches nothing, or is the host's work in a Recording of a GPU."""
    if part["method"] == "none":
        return {"call": number, "status": "ok", "us": 0.0}
    return {"call": number, "status": "host", "reason": ON_HOST}


def call_fields(parts: dict[int, PreparedCall], durations: CallDurations) -> list[dict[str, Any]]:
    """The fields of each Call that was prepared."""
    return [
        {"call": number, "sets": len(part.sets), "status": part.failed["status"], "reason": part.failed["reason"]}
        if part.failed
        else {
            "call": number,
            "sets": len(part.sets),
            "us": durations.us.get(number),
            "kernels": [kernel.model_dump() for kernel in durations.kernels.get(number, [])],
        }
        for number, part in parts.items()
    ]


def program_fields(timing: ProgramTiming, notes: list[str]) -> dict[str, Any]:
    sampled = timing.sampled
    q1, median, q3 = quartiles(counted_samples(sampled.samples, sampled.slow))
    return {
        "status": "ok",
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "samples_us": sampled.samples,
        "slow_samples": sampled.slow,
        "kernel_us": timing.durations.total_us,
        "unmatched_us": timing.durations.unmatched_us,
        "n": timing.n,
        "stop": sampled.rule,
        "method": timing.method,
        "cache": "serving",
        "stretches": timing.stretches,
        "notes": notes + timing.notes + ([f"{len(sampled.slow)} {DROPPED}"] if sampled.slow else []),
    }

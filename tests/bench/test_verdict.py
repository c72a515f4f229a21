"""From Outcomes to a Verdict: what limits a kernel, what is left above the floor, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_datasets import SCALE, counted, workload

from kcap.bench.tasks.folder import OpenTask
from kcap.bench.tasks.verdict import Judgement, next_steps
from kcap.replay.roofline.ceilings import BandwidthLevel, Ceilings
from kcap.schemas.flashinfer.dataset import Dataset
from kcap.schemas.flashinfer.definition import ScalarInput
from kcap.schemas.results.outcome import Clocked, Outcome
from kcap.schemas.results.task import Task
from kcap.schemas.results.verdict import Spread, Verdict, WorkloadVerdict

EPS = ScalarInput(value=0.5)
WORKLOADS = [workload(SCALE, "small", m=2, eps=EPS), workload(SCALE, "large", m=1 << 20, eps=EPS)]
COUNTS = [counted(SCALE, "small", 100, 0), counted(SCALE, "large", 1, 1)]
CEILINGS = Ceilings(levels=[BandwidthLevel(size=0, gb_s=100.0)], tflop_s={"float32": 1.0}, empty_us=3.0)


def clocked(us):
    return Clocked(median_us=us, q1_us=us * 0.9, q3_us=us * 1.2, samples_us=[us] * 3, cache="cold", method="graph")


def outcome(uuid, us=10.0, reference_us=20.0, status="PASSED", floor_us=5.0, **more):
    passed = status == "PASSED"
    return Outcome(
        solution="mine",
        definition="scale",
        workload=uuid,
        status=status,
        time=clocked(us) if passed else None,
        reference=clocked(reference_us) if passed else None,
        floor_us=floor_us if passed else None,
        device_name="GPU",
        **more,
    )


def judgement(*outcomes, **more):
    task = Task(kcap="0", definition="scale", identity="")
    dataset = Dataset(Path("nowhere"), {"scale": SCALE}, {"scale": WORKLOADS}, counts=COUNTS)
    solution_file = SimpleNamespace(
        file=Path("mine.py"), solution=SimpleNamespace(name="mine", author="ann", sources=[])
    )
    return Judgement(
        OpenTask(Path("nowhere"), task, dataset), solution_file, outcomes, find_ceilings=lambda _: CEILINGS, **more
    )


def test_each_workload_has_its_spread_and_its_distance_from_the_floor():
    one = judgement(outcome("small"), outcome("large")).verdict().workloads[0]
    assert (one.time.median_us, one.time.q1_us, one.time.q3_us, one.time.samples) == (10, 9, 12, 3)
    assert (one.floor_us, one.times_floor, one.speedup) == (5, 2, 2)
    assert one.share == pytest.approx(100 / 101)


@pytest.mark.parametrize(
    ("uuid", "us", "limit"), [("small", 5.0, "launch"), ("small", 60.0, "memory"), ("large", 900.0, "memory")]
)
def test_what_limits_a_kernel_is_told_from_the_machines_ceilings(uuid, us, limit):
    (one,) = judgement(outcome(uuid, us=us)).verdict().workloads
    assert one.limited_by == limit
    written = {"small": 2 * 4 * 4, "large": (1 << 20) * 4 * 4}[uuid]  # what is read is not known of such a Definition
    assert one.gb_s == pytest.approx(written / us / 1e3)


def test_without_ceilings_nothing_is_said_of_what_limits_it():
    (one,) = replace(judgement(outcome("small")), find_ceilings=lambda _: None).verdict().workloads
    assert one.limited_by is None


def test_the_gravest_of_all_workloads_is_the_status_and_a_part_is_not_complete():
    verdict = judgement(outcome("small"), outcome("large", status="TIMEOUT", reason="too long")).verdict()
    assert (verdict.status, verdict.reason, verdict.complete) == ("TIMEOUT", "too long", True)
    assert not judgement(outcome("small")).verdict().complete
    assert not judgement(outcome("small"), outcome("large", status="NOT_JUDGED")).verdict().complete


def test_what_does_not_pass_gains_nothing():
    verdict = judgement(outcome("small", us=10), outcome("large", status="INCORRECT_SHAPE")).verdict()
    assert verdict.gain["all"].before_us == 100 * 20


def verdict_of(*workloads, **more):
    return Verdict(definition="scale", solution="mine", **{"status": "PASSED", "workloads": workloads, **more})


def timed(us, count=1, **more):
    spread = Spread(median_us=us, q1_us=us, q3_us=us)
    return WorkloadVerdict(workload=f"w{us}", axes={"m": int(us)}, status="PASSED", count=count, time=spread, **more)


@pytest.mark.parametrize(
    ("workloads", "last"),
    [
        (
            [timed(5, 100, limited_by="launch"), timed(90, 1)],
            "most of its time goes to m 5, where it takes hardly more",
        ),
        (
            [timed(90, limited_by="memory", times_floor=2.5, gb_s=800.0)],
            "m 90, 2.5 times the floor, which memory sets (800 GB/s now)",
        ),
        ([timed(90, limited_by="compute", times_floor=4.0, tflop_s=12.5)], "which arithmetic sets (12.5 TFLOP/s now)"),
        ([timed(90, limited_by="memory", times_floor=1.1)], "1.10 times the floor: little is left"),
        ([timed(90)], "most of its time goes to m 90"),
    ],
    ids=["launch", "memory", "compute", "at the floor", "unknown"],
)
def test_what_to_do_next_is_said_of_the_workload_that_takes_most_of_the_time(workloads, last):
    *_, step = next_steps(verdict_of(*workloads))
    assert last in step


def test_the_workload_on_which_most_is_lost_is_named():
    slower = [timed(10, 100, speedup=0.5), timed(50, 1, speedup=0.1), timed(70, 1, speedup=2.0)]
    assert next(next_steps(verdict_of(*slower, baseline="the engine's kernels"))) == (
        "slower than the engine's kernels at m 10: 2.00 times its time"
    )

"""References on a GPU: each fork has one of its own, by the clocks that operators have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from definitions import definition, tensor, workload

from kcap.replay.datasets.workloads import TIMING_WORKER, WorkloadJob
from kcap.system.worker_process import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
X = tensor("bfloat16", "m", "h")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Worker]:
    session = {"device": None, "home": None, "root": None, "limit": None, "threads": None, "cache": "cold"}
    with Worker(session, TIMING_WORKER) as worker:
        yield worker


def run(worker: Worker, body: str, m: int = 64) -> dict[str, Any]:
    of = definition({"x": X}, {"m": None, "h": 4096}, reference=f"def run(x):\n    {body}\n", outputs={"out": X})
    (request,) = WorkloadJob({"other": 1}, of, workload(of, m=m)).requests(0.02)
    return worker.run(request.body, 120)


def test_a_reference_is_timed_in_a_graph_over_cold_inputs(gpu: Worker) -> None:
    answer = run(gpu, "return x + 1", m=8192)
    assert (answer.get("reason"), answer["method"], answer["cache"]) == (None, "graph", "cold")
    assert answer["device_name"] == gpu.environment["device_name"]
    assert answer["input_sets"] > 1
    assert 10 < answer["median_us"] < 1000


def test_a_reference_that_waits_for_the_gpu_is_timed_by_events(gpu: Worker) -> None:
    answer = run(gpu, "return x * (2 if x[0, 0].item() else 1)")
    assert (answer.get("reason"), answer["method"]) == (None, "events")
    assert answer["notes"][0].startswith("no CUDA graph")


def test_an_illegal_access_costs_its_own_line(gpu: Worker) -> None:
    bad = run(gpu, "return x[(x[:, 0] * 0).long() + x.shape[0]]")
    assert bad["status"] == "failed", bad
    restarts = gpu.restarts
    assert run(gpu, "return x.clone()").get("status", "ok") == "ok"
    assert gpu.restarts == restarts


def test_a_written_input_is_put_back(gpu: Worker) -> None:
    answer = run(gpu, "return x.mul_(2)")
    assert answer.get("reason") is None
    assert answer["method"] == "graph"

"""Timing on a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import torch
from handmade import Values, call, request_for, tensor

from kcap.replay.jobs import REPLAY_WORKER
from kcap.replay.timing import rotation
from kcap.replay.timing.blocking import SpinBlocker, gpu_blocker
from kcap.replay.timing.graphs import do_nothing, timed_us
from kcap.replay.timing.rotation import COLD_FACTOR, l2_bytes
from kcap.replay.timing.sampling import WAITS_FOR_GPU
from kcap.schemas.recording.recording import Count, Metadata, Program, Sample, write_recording
from kcap.schemas.results.measurement import AT_FLOOR, NOTHING
from kcap.schemas.results.measurement import read_program_measurements as read_programs
from kcap.system.worker_process import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


SESSION = {"device": "cuda", "home": "cuda", "root": None, "operators": [], "threads": None}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Worker]:
    with Worker({**SESSION, "kernels": True}, REPLAY_WORKER) as worker:
        yield worker


@pytest.fixture(scope="module")
def cold() -> Iterator[Worker]:
    with Worker({**SESSION, "cache": "cold"}, REPLAY_WORKER) as worker:
        yield worker


@pytest.fixture(scope="module")
def warm() -> Iterator[Worker]:
    with Worker({**SESSION, "cache": "warm"}, REPLAY_WORKER) as worker:
        yield worker


def big(*shape: int, storage: int = 0, dtype: str = "bfloat16"):
    return tensor(*shape, dtype=dtype, storage=storage, device="cuda:0")


def run(worker: Worker, operator: str, *values: object, seconds: float = 0.05) -> dict[str, object]:
    return worker.run(request_for(call(operator, *values), seconds), 120)  # type: ignore[arg-type]


def test_a_matmul_is_timed_in_a_graph_over_cold_inputs(cold: Worker) -> None:
    answer = run(cold, "aten::mm", big(16, 4096), big(4096, 6144, storage=1))
    assert (answer["status"], answer["method"], answer["cache"]) == ("ok", "graph", "cold"), answer
    assert answer["input_sets"] * answer["bytes"] >= COLD_FACTOR * l2_bytes("cuda:0")  # type: ignore[operator]
    bound_us = 4096 * 6144 * 2 / 8e12 * 1e6  # faster than 8 TB/s is no memory that exists
    assert bound_us < answer["median_us"] < 1000  # type: ignore[operator]
    assert answer["clocks"] is None or answer["clocks"]["sm_mhz"] > 0  # type: ignore[index]


def test_cold_reads_are_slower_than_what_the_l2_could_give(cold: Worker) -> None:
    """A 32 MiB copy from rotating inputs cannot beat the memory's bandwidth (4.8 TB/s on an H200)."""
    answer = run(cold, "aten::clone", big(1 << 24))
    assert answer["median_us"] > 2 * (1 << 25) / 5e12 * 1e6  # type: ignore[operator]


def test_what_cannot_be_captured_is_timed_by_events_and_says_so(gpu: Worker) -> None:
    answer = run(gpu, "aten::nonzero", big(4096, dtype="float32"))
    assert (answer["status"], answer["method"]) == ("ok", "events"), answer
    assert "no CUDA graph" in str(answer["notes"])
    assert run(gpu, "aten::relu", big(4096))["method"] == "graph"


def test_a_device_assert_costs_its_own_call_alone(gpu: Worker, tmp_path: Path) -> None:
    """It leaves a process that can run nothing more on the GPU: the next call must get a new one."""
    values = Values()
    sample = Sample(call=0, phase="decode", tensors={"1": values([7] * 64)})
    write_recording(tmp_path / "rec", Metadata(), [], values=values.files)
    lookup = request_for(call("aten::embedding", big(7, 4), big(64, storage=1, dtype="int32")))
    with Worker({**gpu.session, "root": str(tmp_path / "rec")}, REPLAY_WORKER) as worker:
        died = worker.run({**lookup, "sample": orjson.loads(sample.line())}, 120)
        assert died["status"] == "failed"
        assert worker.run(lookup, 120)["status"] == "ok"
        assert worker.restarts == 1


def test_in_place_operators_are_restored_between_replays(gpu: Worker) -> None:
    answer = run(gpu, "aten::mul_.Scalar", big(1 << 20), 2.0)
    assert (answer["status"], answer["method"]) == ("ok", "graph")


def test_more_than_the_gpu_holds_is_skipped(gpu: Worker) -> None:
    answer = run(gpu, "aten::clone", big(1 << 40))
    assert answer["status"] == "skipped"
    assert "free on cuda:0" in str(answer["reason"])


def host(*shape: int, storage: int = 0, dtype: str = "int32"):
    return tensor(*shape, dtype=dtype, storage=storage)


def test_host_work_is_timed_by_the_hosts_clock(gpu: Worker) -> None:
    answer = run(gpu, "aten::lt.Tensor", host(16), host(16, storage=1))
    assert (answer["status"], answer["method"], answer["device"]) == ("ok", "host", "cpu"), answer
    assert answer["median_us"] > 0.1  # type: ignore[operator]


def test_a_kernel_of_no_elements_takes_no_time(gpu: Worker) -> None:
    answer = run(gpu, "aten::fill_.Scalar", big(0, 128, dtype="int32"), 0)
    assert (answer["status"], answer["method"], answer["median_us"]) == ("ok", "none", 0.0), answer
    assert answer["notes"] == [NOTHING]


def test_the_smallest_kernels_are_at_the_floor(gpu: Worker) -> None:
    answer = run(gpu, "aten::add.Tensor", big(16), big(16, storage=1))
    assert (answer["method"], answer["cache"], answer["input_sets"]) == ("graph", "serving", 64), answer
    assert AT_FLOOR in answer["notes"]  # type: ignore[operator]
    assert 0.3 < answer["floor_us"] < 3  # type: ignore[operator]


@pytest.mark.parametrize("to_gpu", [True, False])
def test_an_asynchronous_copy_is_captured_and_costs_no_process(gpu: Worker, to_gpu: bool) -> None:
    ends = (big(1024, dtype="int32"), host(1024, storage=1))
    restarts = gpu.restarts
    answer = run(gpu, "aten::copy_", *(ends if to_gpu else ends[::-1]), True)
    assert (answer["status"], answer["method"]) == ("ok", "graph"), answer
    assert run(gpu, "aten::relu", big(64))["status"] == "ok"
    assert gpu.restarts == restarts


def test_a_blocking_copy_is_timed_by_events(gpu: Worker) -> None:
    answer = run(gpu, "aten::copy_", big(1024, dtype="int32"), host(1024, storage=1), False)
    assert (answer["status"], answer["method"]) == ("ok", "events"), answer


def test_an_embedding_reads_its_rows_from_memory(gpu: Worker) -> None:
    answer = run(gpu, "aten::embedding", big(128256, 4096), big(64, storage=1, dtype="int64"))
    assert (answer["method"], answer["cache"]) == ("graph", "serving"), answer
    assert answer["bytes"] < 1 << 20  # type: ignore[operator]


def test_a_small_weight_is_read_from_memory_in_serving_and_from_the_l2_when_warm(gpu: Worker, warm: Worker) -> None:
    """A norm's weight of 16 KiB cannot fill the L2 by rotating: a sweep between two replays drives it out."""
    given = (big(1, 8192), [8192], big(8192, storage=1), None, 1e-5)
    serving, hot = run(gpu, "aten::layer_norm", *given, False), run(warm, "aten::layer_norm", *given, False)
    assert (serving["cache"], hot["cache"]) == ("serving", "warm")
    assert serving["input_sets"] == serving["n"] > 1  # type: ignore[operator]
    assert hot["median_us"] < serving["median_us"]  # type: ignore[operator]


def test_kernel_durations_are_shorter_than_back_to_back_time_and_name_the_kernel(gpu: Worker) -> None:
    answer = run(gpu, "aten::mm", big(16, 4096), big(4096, 6144, storage=1))
    assert answer["kernels"], answer["notes"]
    assert sum(k["count"] for k in answer["kernels"]) >= 1  # type: ignore[attr-defined,index]
    assert 0.5 * answer["median_us"] < answer["kernel_us"] < 1.05 * answer["median_us"]  # type: ignore[operator]


def test_the_sweep_is_not_among_the_kernels(gpu: Worker) -> None:
    answer = run(gpu, "aten::layer_norm", big(1, 8192), [8192], big(8192, storage=1), None, 1e-5, False)
    assert not [k for k in answer["kernels"] if "amax" in k["name"].lower() or "reduce_kernel" in k["name"]]  # type: ignore[attr-defined,index]


def test_the_gpu_is_held_back_until_the_host_has_queued_its_work() -> None:
    hold = gpu_blocker("cuda:0")
    assert isinstance(hold, SpinBlocker), "torch compiles no kernel here: the substitute sleeps"
    cell, stream = torch.zeros(1, device="cuda"), torch.cuda.current_stream()

    def slow_host() -> None:
        for _ in range(20):
            cell.add_(1)
            time.sleep(0.001)

    hold.reset()
    assert timed_us(slow_host, 20, do_nothing, stream, hold) < 100  # µs each; the host took 1,000
    assert timed_us(slow_host, 20, do_nothing, stream, None) > 500
    assert not hold.timed_out


def test_a_host_that_waits_for_the_held_gpu_is_let_go_after_the_timeout() -> None:
    blocker = gpu_blocker("cuda:0")
    blocker.reset()
    began = time.monotonic()
    timed_us(torch.cuda.synchronize, 1, do_nothing, torch.cuda.current_stream(), blocker)
    blocker.block()
    assert blocker.timed_out
    assert time.monotonic() - began < 10
    blocker.unblock()
    blocker.reset()
    timed_us(do_nothing, 1, do_nothing, torch.cuda.current_stream(), blocker)
    assert not blocker.timed_out


def test_the_persisting_l2_can_be_reset() -> None:
    torch.zeros(1, device="cuda")
    assert rotation.reset_l2_persistence()


def test_a_program_is_one_graph_and_its_kernels_add_up(tmp_path: Path) -> None:
    weight = [call("aten::mm", big(16, 4096), big(4096, 4096, storage=1), id=0)]
    calls = [*weight, call("aten::relu_", big(16, 4096), id=1), call("aten::nonzero", big(64), id=2)]
    whole = Program(id=0, calls=[0, 1] * 8, counts=[Count(phase="decode", count=3)])
    split = Program(id=1, calls=[0, 1, 2, 0, 1], counts=[Count(phase="prefill", count=3)])
    write_recording(tmp_path / "rec", Metadata(), calls, [whole, split])
    out = tmp_path / "p.jsonl"
    command = [sys.executable, "-m", "kcap", "replay", str(tmp_path / "rec"), "--program", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = sorted(read_programs(out), key=lambda program: program.program)
    assert (one.method, one.stretches, one.replayed, one.notes) == ("graph", 1, 16, [])
    assert [(c.call, c.count, c.sets) for c in one.calls] == [(0, 8, 8), (1, 8, 1)]
    assert one.kernel_us == pytest.approx(sum(c.count * (c.us or 0) for c in one.calls))
    assert 0.5 * one.median_us < one.kernel_us < 1.05 * one.median_us  # type: ignore[operator]
    assert (two.method, two.stretches) == ("events", 2)
    assert WAITS_FOR_GPU in two.notes

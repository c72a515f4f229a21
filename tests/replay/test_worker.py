"""One Call that dies takes nothing else with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from handmade import call, request_for, tensor

from kcap.errors import CallError
from kcap.replay.calls.runner import DUMMY_NOTE
from kcap.replay.group.workers import GroupedWorker
from kcap.replay.jobs import REPLAY_WORKER, ReplaySession
from kcap.replay.timing.clock import MAX_LOOP_IN_PLACE, time_host
from kcap.replay.timing.rotation import InputSnapshot
from kcap.replay.timing.sampling import Budget, Timing
from kcap.schemas.derive.bound_call import Inputs
from kcap.schemas.recording.values import TensorSpec, TorchConstant
from kcap.system.worker_process import Worker

MM = call("aten::mm", tensor(8, 8), tensor(8, 8, storage=1))
SESSION = ReplaySession(device="cpu", threads=1, home="cpu", root=None, operators=[], trust=False, cache="cold")
SLOW = call("aten::mm", tensor(3000, 3000), tensor(3000, 3000, storage=1))


def kill_soon(worker: Worker, after: float = 1.0) -> None:
    assert worker.process is not None
    threading.Timer(after, os.kill, (worker.process.pid, signal.SIGSEGV)).start()


def test_a_crash_is_the_calls_own_and_the_next_one_runs(worker: Worker) -> None:
    worker.run(request_for(MM), 60)
    kill_soon(worker)
    before = worker.restarts
    died = worker.run(request_for(SLOW, seconds=30), 60)
    assert died == {"status": "failed", "reason": "crashed: SIGSEGV"}
    assert worker.run(request_for(MM), 60)["status"] == "ok"
    assert worker.restarts == before + 1


def test_a_worker_that_died_between_two_calls_is_started_again(worker: Worker) -> None:
    worker.run(request_for(MM), 60)
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    assert worker.run(request_for(MM), 60)["status"] == "ok"


def test_a_worker_that_cannot_be_started_again_fails_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with GroupedWorker(SESSION, REPLAY_WORKER) as worker:
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        monkeypatch.setattr(worker, "session", {**worker.session, "device": "cuda:99"})
        for _ in range(2):
            answer = worker.run(request_for(MM), 60)
            assert answer["status"] == "failed"
            assert answer["reason"].startswith("the worker could not be started again: ")
        assert worker.restarts == 1
        assert worker.environment["device"] == "cpu", "where the others were timed"


def test_a_worker_that_never_started_is_the_users_to_mend() -> None:
    worker = GroupedWorker({**SESSION, "device": "cuda:99"}, REPLAY_WORKER)
    with pytest.raises(CallError), worker:
        pytest.fail("it started")


def test_a_worker_ends_with_its_parent_even_while_it_waits_for_peers() -> None:
    program = "import time; from kcap.system.worker_process import receive_session as r; r(); time.sleep(300)"
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert worker.stdin is not None
    worker.stdin.write(b"{}\n")
    worker.stdin.close()  # as a parent's end does
    try:
        assert worker.wait(60) == 1
    finally:
        worker.kill()


def test_a_call_that_is_too_slow_is_skipped_with_its_limit(worker: Worker) -> None:
    start = time.monotonic()
    answer = worker.run(request_for(SLOW, seconds=60), 0.5)
    assert answer == {"status": "skipped", "reason": "took longer than 0.5 s (--timeout)"}
    assert time.monotonic() - start < 30
    assert worker.run(request_for(MM), 60)["status"] == "ok"


def test_a_result_that_does_not_fit_is_skipped(worker: Worker) -> None:
    huge = call("aten::new_zeros", tensor(2), [1 << 20, 1 << 20])
    answer = worker.run(request_for(huge), 60)
    assert answer["status"] == "skipped"
    assert "memory" in answer["reason"]


def test_what_an_operator_writes_is_restored_before_it_decays() -> None:
    """Halving a number thousands of times would end in denormals, which are slow."""
    buffers = {("cpu", 0): torch.ones(16).view(torch.uint8)}
    values = buffers["cpu", 0].view(torch.float32)
    inputs = Inputs([values, 0.5], {}, buffers)
    lowest: list[float] = []

    def halve(tensor: torch.Tensor, factor: float) -> None:
        tensor.mul_(factor)
        lowest.append(float(tensor[0]))

    saved = InputSnapshot.of(inputs, [("cpu", 0)])

    def timed() -> Timing:
        return time_host(halve, inputs, lambda: saved.restore([inputs]), Budget(0.01, 0.05), MAX_LOOP_IN_PLACE)

    timings = [timed() for _ in range(5)]  # a busy machine may take a single invocation for long
    assert 1 < max(timing.n for timing in timings) <= MAX_LOOP_IN_PLACE
    assert max(len(timing.samples_us) for timing in timings) > 3
    assert min(lowest) >= 0.5**MAX_LOOP_IN_PLACE


def test_a_wrong_argument_is_a_failure_with_torchs_words(worker: Worker) -> None:
    answer = worker.run(request_for(call("aten::mm", tensor(8, 8), tensor(9, 8, storage=1))), 60)
    assert answer["status"] == "failed"
    assert "mat1 and mat2" in answer["reason"]


@pytest.mark.parametrize("operator", ["aten::from_file", "os::system", "c10d::allreduce_"])
def test_what_may_not_run_is_skipped_with_its_reason(worker: Worker, operator: str) -> None:
    answer = worker.run(request_for(call(operator, "/etc/passwd")), 60)
    assert answer["status"] == "skipped"
    assert answer["reason"]


def test_a_time_on_dummy_weights_says_so() -> None:
    fp8 = call(
        "aten::_scaled_mm",
        tensor(16, 32, dtype="float8_e4m3fn"),
        TensorSpec((32, 16), "float8_e4m3fn", strides=(1, 32), storage=1),
        tensor(storage=2),
        tensor(storage=3),
        None,
        None,
        TorchConstant("dtype", "bfloat16"),
    )
    with GroupedWorker({**SESSION, "dummy_weights": True}, REPLAY_WORKER) as worker:
        answers = [worker.run(request_for(one), 60) for one in (fp8, MM)]
    assert [answer["status"] for answer in answers] == ["ok", "ok"], answers
    assert [DUMMY_NOTE in answer["notes"] for answer in answers] == [True, False]

"""The judge's process: `python -m kcap.bench.judge.worker`, one JSON line in for each Workload of a Solution, one out.

The first line in is the session (dataset, device, limits); the first out says what the device is, or why there is none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import torch
from pydantic import ValidationError

from kcap.bench.judge.driver.device import describe_device
from kcap.bench.judge.driver.gpu_memory import GpuMemory
from kcap.bench.judge.judge import Judge
from kcap.bench.judge.messages import JudgeRequest, JudgeSession
from kcap.bench.judge.process import GPU_SETTINGS, ForkServer, ForkServerGone, Limits
from kcap.bench.judge.verdict import Floors
from kcap.bench.sandbox import guard, libc
from kcap.errors import KcapError, first_line
from kcap.replay.datasets.invocations import prepare_draws
from kcap.replay.rebuild import memory
from kcap.schemas.flashinfer import definition as definitions_file
from kcap.schemas.flashinfer.definition import Workload
from kcap.schemas.flashinfer.solution import Solution
from kcap.system import nvml
from kcap.system.native_build import Unavailable

DISK = 2 << 30  # bytes that a Solution may write
PROCESSES = 512


def main() -> None:
    """Judge until there are no more requests."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    guard()
    for name in GPU_SETTINGS:
        os.environ.pop(name, None)
    torch.set_num_threads(1)  # others would wait for work on the cores of Solutions
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)  # a judge without a command has nobody to tell
    session: JudgeSession = orjson.loads(sys.stdin.buffer.readline())
    try:
        judge = open_judge(session)
    except (KcapError, Unavailable, RuntimeError, ValueError, OSError) as error:
        send(answers, {"error": first_line(error)})
        return
    try:
        _serve(judge, answers)
    finally:
        with contextlib.suppress(ForkServerGone, KcapError, OSError):
            judge.close()
        judge.server.close()
        shutil.rmtree(judge.limits.scratch, ignore_errors=True)


def _serve(judge: Judge, answers: BinaryIO) -> None:
    send(answers, judge.environment)
    send(answers, {"ready": True})
    for line in sys.stdin.buffer:
        request: JudgeRequest = orjson.loads(line)
        outcome = judge.judge(
            Solution.model_validate(request["solution"]),
            definitions_file.from_bytes(request["definition"].encode()),
            Workload.model_validate(request["workload"]),
        )
        send(answers, outcome.model_copy(update={"file": request.get("file", "")}).model_dump(mode="json"))


def send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")


def open_judge(session: JudgeSession) -> Judge:
    """A Judge for the session's device; KcapError or Unavailable where there can be none."""
    device = session["device"]
    threads, cores = cpu_share(session.get("threads"))
    environment, gpu = describe_device(device, threads)
    others = nvml.other_gpus(device) if gpu else None
    scratch = Path(tempfile.mkdtemp(prefix="kcap-bench-", dir=session.get("scratch")))
    limits = Limits(
        device=device if others is None else "cuda:0",
        threads=threads,
        cores=cores if device == "cpu" else (),
        timeout=session["timeout"],
        build_timeout=session.get("build_timeout") or 600.0,
        memory=(session.get("memory") or memory.free_bytes("cpu") // 2) if device == "cpu" else None,
        disk=DISK,
        processes=PROCESSES,
        scratch=scratch,
        hidden=(*map(Path, session.get("hidden", ())), *(others or ())),
        gpu=gpu,
        gpu_memory=GpuMemory(device) if gpu else None,
    )
    root = Path(session["root"]) if session.get("root") else None
    visible = {} if others is None else {"CUDA_VISIBLE_DEVICES": nvml.uuid_of(device)}
    server = ForkServer({**quiet_threads(threads), **visible})
    if gpu:
        os.environ.pop("TRITON_INTERPRET", None)  # it is for Solutions, and those have it
        prepare_draws(device)
    return Judge(root, limits, session["seconds"], server, Floors(environment), environment)


def cpu_share(wanted: int | None) -> tuple[int, tuple[int, ...]]:
    """Threads of a Solution, and the cores that are theirs; the judge keeps one to itself where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    threads = min(wanted or max(len(cores) - 1, 1), len(cores))
    return threads, tuple(cores[-threads:])


def quiet_threads(threads: int) -> dict[str, str]:
    """For libraries' pools of threads: how many, and that they sleep when they have nothing to do."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


if __name__ == "__main__":
    try:
        main()
    except ValidationError as error:
        sys.exit(str(error))

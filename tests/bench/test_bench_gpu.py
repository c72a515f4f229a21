"""`kcap bench` on a GPU: from a Recording to the share of the engine's time that a Solution saves."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest
import torch
from judged import outcomes_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROGRAM = """
import sys
import torch
import kcap
weight = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
inputs = [torch.randn(n, 1024, dtype=torch.bfloat16, device="cuda") for n in (256, 16)]
with torch.no_grad(), kcap.record(sys.argv[1]) as recorder:
    for x, phase, steps in zip(inputs, ("prefill", "decode"), (2, 30)):
        for _ in range(steps):
            with recorder.step(phase):
                torch.nn.functional.linear(x, weight)
"""
GEMM = "gemm_bf16_n4096_k1024"
RIGHT = "import torch\n\ndef run(A, B):\n    return torch.nn.functional.linear(A, B)\n"
WRONG = "import torch\n\ndef run(A, B):\n    return torch.nn.functional.linear(A, B) * 1.5\n"
ALONE = """import os
import torch

def run(A, B):
    assert torch.cuda.device_count() == 1
    opened = 0
    for name in os.listdir("/dev"):
        if name.startswith("nvidia") and name[6:].isdigit():
            try:
                os.close(os.open("/dev/" + name, os.O_RDONLY))
                opened += 1
            except OSError:
                pass
    assert opened == 1, opened
    return torch.nn.functional.linear(A, B)
"""
SLOW = "import torch\n\ndef run(A, B):\n    return (A.double() @ B.double().T).bfloat16()\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "linear.kcap"
    subprocess.run([sys.executable, "-c", PROGRAM, str(path)], check=True)
    return path


@pytest.fixture
def solutions(tmp_path):
    folder = tmp_path / "solutions"
    folder.mkdir()
    for name, source in (("right", RIGHT), ("wrong", WRONG), ("slow", SLOW)):
        (folder / f"{name}.py").write_text(f"# definition: {GEMM}\n{source}")
    return folder


def test_what_a_solution_saves_is_a_share_of_the_engines_gpu_time(kcap, recorded, solutions, tmp_path):
    measured = tmp_path / "m.jsonl"
    assert kcap("replay", recorded, "-o", measured, "--seconds", 0.05).code in (0, 3)
    args = ("--solutions", solutions, "-o", tmp_path / "out", "--measurements", measured, "--json")
    done = kcap("bench", recorded, *args, "--device", "cuda:0", "--seconds", 0.05)
    assert done.code == 0, done.err
    status = {(one.solution, one.status) for one in outcomes_in(tmp_path / "out")}
    assert status == {("right", "PASSED"), ("slow", "PASSED"), ("wrong", "INCORRECT_NUMERICAL")}
    told = orjson.loads(done.out)
    assert told["baseline"] == "the engine's kernels"
    by_name = {one["solution"]: one for one in told["solutions"]}
    assert by_name["slow"]["saves"]["all"]["saved_us"] < 0
    assert abs(by_name["right"]["saves"]["decode"]["share"]) < 0.5  # the engine's kernel itself
    assert by_name["wrong"]["saves"] == {}
    assert {one.device_name for one in outcomes_in(tmp_path / "out")} == {torch.cuda.get_device_name(0)}


def test_gpus_judge_by_default_what_was_recorded_on_one(kcap, recorded, solutions, tmp_path):
    done = kcap("bench", recorded, "--solutions", solutions, "-o", tmp_path / "out", "--seconds", 0.02)
    assert done.code == 0, done.err
    devices = {one.device for one in outcomes_in(tmp_path / "out")}
    assert devices and devices <= {f"cuda:{number}" for number in range(min(torch.cuda.device_count(), 3))}


def test_a_gpu_that_is_not_there_is_a_wrong_call(kcap, recorded, solutions, tmp_path):
    done = kcap("bench", recorded, "--solutions", solutions, "-o", tmp_path / "out", "--device", "cuda:99")
    assert (done.code, "this machine has" in done.err, (tmp_path / "out").exists()) == (2, True, False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_solution_cannot_open_the_other_gpus(kcap, recorded, tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "alone.py").write_text(f"# definition: {GEMM}\n{ALONE}")
    last = f"cuda:{torch.cuda.device_count() - 1}"
    words = ("--solutions", tmp_path / "solutions", "-o", tmp_path / "out", "--device", last, "--seconds", 0.02)
    done = kcap("bench", recorded, *words)
    assert done.code == 0, done.err
    assert {(one.status, one.device) for one in outcomes_in(tmp_path / "out")} == {("PASSED", last)}

"""An agent's loop, played by a program with the real judge: wrong, right, faster, by the verdicts alone.

The program reads nothing but the verdicts. It asks 30 times; half of its answers come within 15 seconds on a CPU, and
within 10 on a GPU.
"""

from __future__ import annotations

import time
from statistics import median

import pytest
from bench_datasets import SCALE, counted, of, workload

from kcap.bench.run.options import JudgeOptions
from kcap.bench.tasks.folder import open_task
from kcap.bench.tasks.serve import JudgeRequest, judge_request
from kcap.bench.tasks.warm_judge import WarmJudge
from kcap.schemas.flashinfer.dataset import write_dataset
from kcap.schemas.flashinfer.definition import AxisConst, AxisVar, Definition, ScalarInput

pytestmark = pytest.mark.alone

JUDGEMENTS = 30
MOST_MEDIAN_S = {"cpu": 15.0, "cuda:0": 10.0}
EPS = ScalarInput(value=1e-5)
NORM = Definition(
    name="norm",
    op_type="rmsnorm",
    axes={"m": AxisVar(), "n": AxisConst(value=512)},
    inputs={"x": of("m n"), "weight": of("n"), "eps": of(None)},
    outputs={"y": of("m n")},
    reference="import torch\n\n\ndef run(x, weight, eps):\n"
    "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight\n",
)
ATTEMPTS = {
    "broken": "import torch\n\ndef run(x, weight, eps:\n    return x\n",
    "raises": "import torch\n\ndef run(x, weight, eps):\n    return x @ weight[:3]\n",
    "shape": "import torch\n\ndef run(x, weight, eps):\n    return x[:-1]\n",
    "tail": "import torch\n\ndef run(x, weight, eps):\n"
    "    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight\n    y[:, -32:] = 0\n    return y\n",
    "slow": "import torch\n\ndef run(x, weight, eps):\n    rows = [row * torch.rsqrt(row.pow(2).mean() + eps) * weight"
    " for row in x]\n    return torch.stack(rows)\n",
    "fast": "import torch\n\ndef run(x, weight, eps):\n"
    "    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)\n",
}


def next_attempt(verdict) -> str:
    """What the program tries next: from the verdict alone."""
    speedup = verdict.gain["all"].speedup if "all" in verdict.gain else None
    match verdict.status:
        case "COMPILE_ERROR":
            assert verdict.compiler[0].line == 4, verdict
            return "raises"
        case "RUNTIME_ERROR":
            assert verdict.compiler[0].line == 5, verdict
            return "shape"
        case "INCORRECT_SHAPE":
            return "tail"
        case "INCORRECT_NUMERICAL":
            assert verdict.reason.startswith("y"), verdict
            return "slow"
        case "PASSED" if speedup is not None and speedup < 1:
            return "fast"
        case "PASSED":
            return "done"
    return "again"  # the machine was busy


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_program_goes_from_wrong_to_right_to_faster_by_the_verdicts_alone(kcap, tmp_path, device):
    workloads = [workload(NORM, f"w{size}", m=size, eps=EPS) for size in (16, 64, 200)]
    counts = [counted(NORM, one.uuid, 10 * (call + 1), call) for call, one in enumerate(workloads)]
    write_dataset(tmp_path / "dataset", [NORM, SCALE], {"norm": workloads}, {}, counts)
    args = ("--definition", "norm", "-o", tmp_path / "task", "--trust", "--no-check", "--device", device)
    assert kcap("task", tmp_path / "dataset", *args, "--held-out", 1, "--held-out-to", tmp_path / "kept").code == 0
    seconds, seen, attempt = [], [], "broken"
    with WarmJudge(open_task(tmp_path / "task", trust=True), JudgeOptions(device=device, seconds=0.03)) as judge:
        while len(seconds) < JUDGEMENTS:
            quick = len(seconds) % 2 == 0
            began = time.monotonic()
            verdict = judge_request(judge, JudgeRequest(source=f"# definition: norm\n{ATTEMPTS[attempt]}", quick=quick))
            seconds.append(time.monotonic() - began)
            seen.append((attempt, verdict.status))
            following = next_attempt(verdict)
            attempt = {"again": attempt, "done": "broken"}.get(following, following)
    print(f"median {median(seconds):.2f} s, longest {max(seconds):.2f} s")
    assert {("broken", "COMPILE_ERROR"), ("raises", "RUNTIME_ERROR"), ("shape", "INCORRECT_SHAPE")} <= set(seen)
    assert {("tail", "INCORRECT_NUMERICAL"), ("slow", "PASSED"), ("fast", "PASSED")} <= set(seen)
    assert median(seconds) < MOST_MEDIAN_S[device]

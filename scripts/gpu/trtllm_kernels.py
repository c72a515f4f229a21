"""What kcap makes of TensorRT-LLM's own kernels, without its engine: a table to report.

    python scripts/gpu/trtllm_kernels.py [--limit SECONDS] [--output DIR]

A program calls three operators at Llama-3.1-8B's widths (an eighth of them on a CPU, with a stand-in): `cublas_mm`,
`fp8_quantize_1x128`, and `fp8_block_scaling_gemm_impl` on what that returned; eagerly for 16 tokens and for 512, and
for 16 in a CUDA graph. It is recorded by `kcap record`. Of each operator are checked its counts, that it replays, and
its Definition against it. One that fails is a line of the table, and the next one is tried. Needs a Hopper GPU and
TensorRT-LLM's kernels as torch's operators (`pip install tokenspeed-trtllm-kernel`, with libnuma). Exits with 1 if a
line is BAD.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from counts import Check, end_with
from fidelity import run

import kcap
from kcap.errors import DONE, PARTIAL

OPERATORS = ("cublas_mm", "fp8_quantize_1x128", "fp8_block_scaling_gemm_impl")
EAGER = {16: 6, 512: 2}  # how often, by tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPLAYS = 10 if DEVICE == "cuda" else 0  # of a graph, of 16
PROGRAM = '''
"""Calls trtllm's operators; prints why one does not run, and leaves it out."""
import json
import sys
import torch
import trtllm_kernel  # registers them

BLOCK = 128
eager, replays, device = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
HIDDEN, WIDE = (4096, 6144) if device == "cuda" else (512, 768)
torch.manual_seed(0)


class Products(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.failed = set()
        self.weight = torch.randn(WIDE, HIDDEN, device=device, dtype=torch.bfloat16) / HIDDEN**0.5
        blocks = self.weight.float().view(WIDE // BLOCK, BLOCK, HIDDEN // BLOCK, BLOCK)
        self.scale = (blocks.abs().amax((1, 3)) / 448).contiguous()
        scaled = blocks / self.scale[:, None, :, None]
        self.quantized = scaled.view(WIDE, HIDDEN).to(torch.float8_e4m3fn)

    def call(self, name, *args):
        if name in self.failed:
            return None
        try:
            result = getattr(torch.ops.trtllm, name)(*args)
            if device == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return result
        except Exception as error:
            self.failed.add(name)
            print("failed", name, f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
            return None

    def forward(self, x):
        product = self.call("cublas_mm", x, self.weight.t(), None, None)
        pair = self.call("fp8_quantize_1x128", x)
        if pair is not None:
            other = self.call("fp8_block_scaling_gemm_impl", pair[0], self.quantized, pair[1], self.scale)
            return product, other
        return product, None


with torch.no_grad():
    model = Products()
    inputs = {int(tokens): torch.randn(int(tokens), HIDDEN, device=device, dtype=torch.bfloat16) for tokens in eager}
    for tokens, times in eager.items():
        for _ in range(times):
            product, other = model(inputs[int(tokens)])
    if product is not None and other is not None:
        print("difference", float((product.float() - other.float()).norm() / product.float().norm()), flush=True)
    if replays:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(inputs[16])
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
'''


def record(output: Path, until: float) -> Iterator[Check]:
    program = output / "trtllm_kernels.py"
    program.write_text(PROGRAM)
    shutil.rmtree(output / "trtllm_kernels.kcap", ignore_errors=True)  # of an earlier run
    record = [sys.executable, "-m", "kcap", "record", "--force", "-o", str(output / "trtllm_kernels.kcap"), "--"]
    words = [*record, sys.executable, str(program), json.dumps(EAGER), str(REPLAYS), DEVICE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=max(until - time.monotonic(), 1))
    print(done.stdout[-3000:], done.stderr[-3000:], f"status {done.returncode}", flush=True)
    for line in done.stdout.splitlines():
        if line.startswith("failed "):
            _, name, reason = line.split(" ", 2)
            yield Check(f"{name} runs", reason[:200], False)
        if line.startswith("difference "):
            share = float(line.split()[1])
            yield Check("both products", f"{share:.1%} apart", share < 0.1)
    recording = kcap.load(output / "trtllm_kernels.kcap")
    yield Check("the Recording is complete", str(recording.metadata.complete), recording.metadata.complete)
    for name in OPERATORS:
        wanted = {"eager": sum(EAGER.values()), "graph": REPLAYS}
        calls = [call for call in recording.kernels() if call.operator.split(".")[0] == f"trtllm::{name}"]
        counts = [count for call in calls for count in call.counts]
        counted = {mode: sum(count.count for count in counts if count.mode == mode) for mode in wanted}
        found = ", ".join(f"{number} {mode}" for mode, number in counted.items())
        yield Check(f"{name} counted", found, counted == wanted)


def replay(output: Path, until: float) -> Iterator[Check]:
    times = output / "trtllm_kernels.times.jsonl"
    times.unlink(missing_ok=True)
    words = ("--op", "trtllm::*", "--device", DEVICE, "-o", str(times))
    run("replay", str(output / "trtllm_kernels.kcap"), *words, until=until)
    lines = [json.loads(line) for line in times.read_text().splitlines()] if times.is_file() else []
    for name in OPERATORS:
        of_name = [line for line in lines if line["operator"].split(".")[0] == f"trtllm::{name}"]
        timed = [line["median_us"] for line in of_name if line.get("status", "ok") == "ok" and line.get("median_us")]
        reasons = {str(line.get("reason")) for line in of_name if line.get("status", "ok") != "ok"}
        found = "; ".join([*(f"{us:.1f} us" for us in timed), *sorted(reasons)]) or "no such line"
        yield Check(f"{name} replayed", found, bool(timed) and not reasons)


def export(output: Path, until: float) -> Iterator[Check]:
    dataset = output / "trtllm_kernels.dataset"
    words = ("--to", "flashinfer-bench", "-o", str(dataset), "--force", "--device", DEVICE)
    done = run("export", str(output / "trtllm_kernels.kcap"), *words, until=until)
    if done.returncode not in (DONE, PARTIAL):
        raise RuntimeError(f"status {done.returncode}")
    checks = [json.loads(line) for line in (dataset / "checks.jsonl").read_text().splitlines()]
    for name in OPERATORS:
        of_name = [check for check in checks if check["operator"].split(".")[0] == f"trtllm::{name}"]
        for check in of_name:
            said = f"{check['status']} {check.get('reason') or ''}".strip()[:200]
            yield Check(f"{name}, {check['definition']}", said, check["status"] == "agrees")
        if not of_name:
            yield Check(f"{name} verified", "it has no Definition", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=120, help="seconds  [default: 120]")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit
    rows: list[Check] = []
    for stage in (record, replay, export):
        try:
            rows.extend(stage(args.output, until))
        except Exception as error:  # the others go on
            rows.append(Check(stage.__name__, f"{type(error).__name__}: {error}"[:300], False))
    end_with(rows, separator=": ")


if __name__ == "__main__":
    main()

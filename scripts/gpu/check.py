"""Everything that needs a GPU, in one command: record real vLLM, check the counts, replay, measure the cost.

    python scripts/gpu/check.py [--quick] [--output DIR]

Records the Llama-3.1-8B and Qwen3-8B configurations (dummy weights, eager), checks in every step what the architecture
says must have run, replays the Recording, measures what recording costs, runs the tests marked `gpu`, and prints a
short table last. Needs an NVIDIA GPU and vLLM; exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import kcap
from kcap.schemas.recording import Program, Recording

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    found: str
    passed: bool


def run(*command: str, timeout: int = 560) -> subprocess.CompletedProcess[str]:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    print(f"$ {' '.join(command)}   ({time.perf_counter() - start:.0f} s, status {done.returncode})", flush=True)
    print(done.stdout[-5000:], done.stderr[-2500:], flush=True)
    return done


def record(model: str, output: Path, *more: str) -> Row:
    what = ("--model", model, "--framework", "vLLM", "--load-format", "dummy", *more)
    done = run(sys.executable, "-m", "kcap", "record", *what, "-o", str(output), "--force")
    return Row(f"record {model}", f"status {done.returncode}", done.returncode == 0)


def expected(layers: int, norms_per_layer: int) -> dict[str, int]:
    """Kernels of one eager step with logits, by base name, as a dense Llama-like architecture must run them."""
    return {
        "aten::linear": 4 * layers + 1,
        "_vllm_fa3_C::fwd": layers,
        "_C_cache_ops::reshape_and_cache_flash": layers,
        "_C::silu_and_mul": layers,
        "_C::rotary_embedding": layers,
        "rms_norm": norms_per_layer * layers + 1,
    }


def counted(recording: Recording, program: Program) -> Counter[str]:
    names: Counter[str] = Counter()
    for number in program.calls:
        call = recording.calls[number]
        base = call.operator.split(".")[0]
        if call.kind == "kernel":
            names["rms_norm" if base in ("_C::rms_norm", "_C::fused_add_rms_norm") else base] += 1
    return names


def check_counts(path: Path, layers: int, norms_per_layer: int) -> list[Row]:
    recording = kcap.load(path)
    steps = recording.metadata.steps
    rows = [Row(f"{path.name}: steps", str(steps), sum(steps.values()) > 0)]
    want = expected(layers, norms_per_layer)
    wrong: Counter[str] = Counter()
    for program in recording.programs:
        found = counted(recording, program)
        wrong.update(name for name, number in want.items() if found[name] != number)
        if wrong:
            print({name: (found[name], number) for name, number in want.items()}, found.most_common(30))
    for name, number in want.items():
        rows.append(
            Row(f"{path.name}: {name} in each step", f"{number}; wrong in {wrong[name]} Programs", not wrong[name])
        )
    return rows


def replay(path: Path) -> list[Row]:
    done = run(
        sys.executable, "-m", "kcap", "replay", str(path), "-o", str(path.with_suffix(".replay.jsonl")), "--json"
    )
    try:
        summary = json.loads(done.stdout)
    except ValueError:
        return [Row(f"replay {path.name}", f"status {done.returncode}", False)]
    replayed, skipped, failed = (summary[part] for part in ("replayed", "skipped", "failed"))
    found = (
        f"{replayed['share']:.1%} of the counts in {replayed['calls']} calls, {skipped['calls']} skipped, "
        f"{failed['calls']} failed; GPU {summary['gpu_time_us'] / 1e3:.1f} ms, "
        f"host {summary['host_time_us'] / 1e3:.1f} ms"
    )
    for part in (skipped, failed):
        print(*(reason["reason"] for reason in part["reasons"]), sep="\n")
    return [Row(f"replay {path.name}", found, done.returncode in (0, 3) and replayed["share"] >= 0.9)]


def overhead(seconds: float, pairs: int, *more: str) -> list[Row]:
    script = str(ROOT / "scripts/gpu/overhead.py")
    done = run(sys.executable, script, "--seconds", str(seconds), "--pairs", str(pairs), *more)
    lines = [line for line in done.stdout.splitlines() if line.startswith("throughput loss")]
    return [Row(*line.split(": ", 1), done.returncode == 0) for line in lines] or [Row("overhead", "nothing", False)]


def gpu_tests() -> Row:
    done = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests"))
    last = done.stdout.strip().splitlines()[-1:] or ["nothing"]
    return Row("tests marked gpu", last[0], done.returncode == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers and shorter runs")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    parser.add_argument("--only", action="append", help="llama, qwen, replay, overhead or tests; all without it")
    args = parser.parse_args()
    wanted = set(args.only or ("llama", "qwen", "replay", "overhead", "tests"))
    args.output.mkdir(parents=True, exist_ok=True)
    layers = ["--num-layers", "4"] if args.quick else []
    llama, qwen = args.output / "llama.kcap", args.output / "qwen3.kcap"
    load = ["--num-prompts", "16", "--input-len", "256", "--output-len", "64"]
    rows: list[Row] = []
    if "llama" in wanted:
        rows += [record("meta-llama/Llama-3.1-8B", llama, *load, *layers)]
        rows += check_counts(llama, 4 if args.quick else 32, 2) if rows[-1].passed else []
    if "replay" in wanted:
        rows += replay(llama)
    if "qwen" in wanted:
        rows += [
            record("Qwen/Qwen3-8B", qwen, "--num-prompts", "8", "--input-len", "128", "--output-len", "16", *layers)
        ]
        rows += check_counts(qwen, 4 if args.quick else 36, 4) if rows[-1].passed else []
    if "overhead" in wanted:
        rows += overhead(1 if args.quick else 5, 2 if args.quick else 5, *layers)
    if "tests" in wanted:
        rows.append(gpu_tests())
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{'ok ' if row.passed else 'BAD'}  {row.what:<{width}}  {row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()

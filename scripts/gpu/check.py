"""Everything that needs a GPU, in one command: record vLLM as it serves, check the counts, replay, measure the cost.

    python scripts/gpu/check.py [--quick] [--output DIR] [--only PART]… [--limit SECONDS]

Parts: `counts` (Llama-3.1-8B's configuration, dummy weights, compiled with CUDA graphs and eager: the architecture's
numbers in every step, the GPU time explained), `qwen` (Qwen3-8B's, vLLM's V2 runner), `replay`, `fidelity` (replayed
kernels and whole Programs against the engine's own GPU time), `datasets` (exported, each reference checked on the GPU),
`modes` (piecewise graphs, compiled without graphs, MoE, FP8, speculative decoding), `outputs` (tokens and compilations
with and without recording), `judging` (honest Solutions and cheats), `replays` (a million of a graph), `overhead`,
`sglang` (SGLang with the attention backends triton and flashinfer: the architecture's numbers, the GPU time explained,
the cost), `tests` (those marked gpu). Prints a short table last. A part that fails costs its own lines alone; when the
limit is over no other is begun. Needs an NVIDIA GPU and vLLM, or (`--only sglang`) SGLang, whose interpreter is
KCAP_SGLANG_PYTHON, .venv-sglang's or this one; exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import counts
import outputs
import sglang_counts
from counts import Check, end_with
from fidelity import QUICK

ROOT = Path(__file__).resolve().parents[2]
LLAMA, QWEN, MOE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
LOAD = ("--num-prompts", "16", "--input-len", "256", "--output-len", "64")
GRAPHS, NO_GRAPHS = (f'compilation_config={{"cudagraph_mode": "{mode}"}}' for mode in ("PIECEWISE", "NONE"))
NGRAM = 'speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
MODES = {
    "piecewise graphs": (LLAMA, "--engine-arg", GRAPHS),
    "compiled, no graphs": (LLAMA, "--engine-arg", NO_GRAPHS),
    "FP8 linears": (LLAMA, "--engine-arg", "quantization=fp8"),
    "n-gram speculation": (LLAMA, "--engine-arg", NGRAM),
    "mixture of experts": (MOE, "--engine-arg", "moe_backend=triton"),  # others are compiled for minutes first
}
PARTS = "counts qwen replay fidelity datasets modes outputs judging replays overhead sglang tests".split()
BACKENDS = ("triton", "flashinfer")  # of SGLang's attention
SGLANG = ("sampling_backend=pytorch", "mem_fraction_static=0.6")  # FlashInfer's sampling is compiled for a minute first
LOSS = {"--compiled": 0.01, "": 0.05}  # of throughput, at most
FIDELITY_S = 3600  # and a minute, in which its table is printed


def run(*command: str, timeout: float = 580) -> subprocess.CompletedProcess[str]:
    """Status 124 where it took longer than `timeout` seconds: it is killed, with its engine and that one's workers."""
    start = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            (output, errors), status = process.communicate(), 124
    done = subprocess.CompletedProcess(command, status, output, errors)
    print(f"$ {' '.join(command)}   ({time.perf_counter() - start:.0f} s, status {done.returncode})", flush=True)
    print(done.stdout[-5000:], done.stderr[-2500:], flush=True)
    return done


def record(model: str, output: Path, *more: str, framework: str = "vLLM", python: str = sys.executable) -> Check:
    what = ("--model", model, "--framework", framework, "--load-format", "dummy", "--check-coverage", *more)
    done = run(python, "-m", "kcap", "record", *what, "-o", str(output), "--force")
    return Check(f"record {output.stem}", f"status {done.returncode}", done.returncode == 0)


def checked(output: Path, layers: int, eager: Path | None = None) -> list[Check]:
    if not (output / "recording.json").is_file():
        return []
    rows = counts.check(output, layers, eager)
    return [Check(f"{output.stem}: {row.what}", row.found, row.passed) for row in rows]


class Parts:
    """The parts, each a method that answers its lines of the table."""

    def __init__(self, output: Path, quick: bool, asked: tuple[str, ...] = ()) -> None:
        self.output, self.quick, self.asked = output, quick, asked
        self.depth = ("--num-layers", str(QUICK)) if quick else ()
        self.llama, self.eager = output / "llama.kcap", output / "llama-eager.kcap"

    def _layers(self, all_of_them: int) -> int:
        return QUICK if self.quick else all_of_them

    def counts(self) -> list[Check]:
        rows = [record(LLAMA, self.eager, "--eager", *LOAD, *self.depth), record(LLAMA, self.llama, *LOAD, *self.depth)]
        layers = self._layers(32)
        return [*rows, *checked(self.eager, layers), *checked(self.llama, layers, self.eager)]

    def qwen(self) -> list[Check]:
        output = self.output / "qwen3.kcap"
        rows = [record(QWEN, output, "--num-prompts", "8", "--output-len", "24", *self.depth)]
        return [*rows, *checked(output, self._layers(36))]

    def modes(self) -> list[Check]:
        return [row for name, (model, *more) in MODES.items() for row in self._mode(name, model, *more)]

    def _mode(self, name: str, model: str, *more: str) -> list[Check]:
        output = self.output / (name.replace(" ", "-").replace(",", "") + ".kcap")
        row = record(model, output, "--num-layers", "4", "--num-prompts", "8", "--output-len", "24", *more)
        if not (output / "recording.json").is_file():
            return [row]
        share = counts.check_share(counts.Counts(output))
        return [row, Check(f"{name}: {share.what}", share.found, share.passed)]

    def replay(self) -> list[Check]:
        if not (deep := counts.check_depth(self.llama, self._layers(32))).passed:
            return [deep]
        measured = str(self.llama.with_suffix(".measurements.jsonl"))
        done = run(sys.executable, "-m", "kcap", "replay", str(self.llama), "-o", measured, "--force", "--json")
        try:
            summary = json.loads(done.stdout)
        except ValueError:
            return [Check(f"replay {self.llama.name}", f"status {done.returncode}", False)]
        replayed, skipped, failed = (summary[part] for part in ("replayed", "skipped", "failed"))
        for part in (skipped, failed):
            print(*(reason["reason"] for reason in part["reasons"]), sep="\n")
        found = f"{replayed['share']:.1%} of the counts in {replayed['calls']} calls, {skipped['calls']} skipped, "
        found += f"{failed['calls']} failed; GPU {summary['gpu_time_us'] / 1e3:.1f} ms"
        return [Check(f"replay {self.llama.name}", found, done.returncode in (0, 3) and replayed["share"] >= 0.9)]

    def fidelity(self) -> list[Check]:
        more = ("--quick", "--mode", "compiled") if self.quick else ()
        words = (*more, "--limit", str(FIDELITY_S), "--output", str(self.output))
        return _lines("fidelity", self._script("fidelity.py", *words, timeout=FIDELITY_S + 60))

    def datasets(self) -> list[Check]:
        rows = {path: counts.check_depth(path, self._layers(32)) for path in (self.eager, self.llama)}
        bad = [row for row in rows.values() if not row.passed]
        if not (there := [str(path) for path, row in rows.items() if row.passed]):
            return bad
        return [*bad, *_lines("datasets", self._script("verified_exports.py", *there, "--output", str(self.output)))]

    def outputs(self) -> list[Check]:
        done = self._script("outputs.py", *self.depth)
        said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if " recorded the same" in line)
        rows = [_same(mode, said.get(mode, "nothing")) for mode in outputs.MODES]
        return [*rows, Check("outputs", f"status {done.returncode}", done.returncode == 0)]

    def judging(self) -> list[Check]:
        return _lines("judging", self._script("judge.py", "-o", str(self.output / "judged.jsonl")))

    def replays(self) -> list[Check]:
        done = self._script("replays.py", *(("--replays", "100000") if self.quick else ()))
        found = "; ".join(done.stdout.splitlines()[-2:])
        return [Check("a million replays", found, done.returncode == 0)]

    def overhead(self) -> list[Check]:
        return [row for mode, most in LOSS.items() for row in self._overhead(mode, most)]

    def _overhead(self, mode: str, most: float) -> list[Check]:
        seconds, pairs = ("1", "2") if self.quick else ("5", "5")
        words = ("--seconds", seconds, "--pairs", pairs, "--batch", "16", *((mode,) if mode else ()), *self.depth)
        done = self._script("overhead.py", *words)
        rows = [line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("throughput")]
        found = [Check(what, text, median(text) <= most) for what, text in rows]
        return ended(f"overhead {mode}".strip(), done, found)

    def sglang(self) -> list[Check]:
        python = sglang_python()
        if run(python, "-c", "import sglang").returncode:
            return [Check("SGLang", f"not tried: {python} has none", "sglang" not in self.asked)]
        return [row for backend in BACKENDS for row in self._sglang(backend, python)]

    def _sglang(self, backend: str, python: str) -> list[Check]:
        output, script = self.output / f"sglang-{backend}.kcap", str(ROOT / "scripts/gpu/sglang_overhead.py")
        words = [word for given in (*SGLANG, f"attention_backend={backend}") for word in ("--engine-arg", given)]
        rows = [record(LLAMA, output, *LOAD, *self.depth, *words, framework="SGLang", python=python)]
        if (output / "recording.json").is_file():
            found = sglang_counts.check(output, self._layers(32))
            rows += [Check(f"{output.stem}: {row.what}", row.found, row.passed) for row in found]
        steps = ("--steps", "600" if self.quick else "3000")
        return rows + _lines(f"cost of {backend}", run(python, script, "--backend", backend, *steps))

    def tests(self) -> list[Check]:
        done = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests"))
        last = done.stdout.strip().splitlines()[-1:] or ["nothing"]
        ran = re.search(r"\b[1-9]\d* passed", last[0]) is not None
        return [Check("tests marked gpu", last[0], done.returncode == 0 and ran)]

    def _script(self, name: str, *words: str, timeout: int = 580) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, str(ROOT / "scripts/gpu" / name), *words, timeout=timeout)


def sglang_python() -> str:
    """The interpreter that has SGLang, perhaps."""
    made = ROOT / ".venv-sglang/bin/python"
    return os.environ.get("KCAP_SGLANG_PYTHON") or (str(made) if made.exists() else sys.executable)


def _lines(what: str, done: subprocess.CompletedProcess[str]) -> list[Check]:
    """The table that a script printed last."""
    rows = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "BAD "))]
    found = [Check(*line[5:].rsplit(": ", 1), line.startswith("ok ")) for line in rows]
    return ended(what, done, found)


def ended(what: str, done: subprocess.CompletedProcess[str], found: list[Check]) -> list[Check]:
    """`found`, and how the script ended where it said nothing, or failed otherwise than it said."""
    said = found and (done.returncode == 0 or not all(row.passed for row in found))
    return found if said else [*found, Check(what, f"status {done.returncode}", False)]


def _same(mode: str, found: str) -> Check:
    """The control may differ: batches and kernels do from run to run."""
    wanted = ("recorded the same: True", "counters the same: True")
    return Check(f"outputs, {mode}", found, all(words in found for words in wanted))


def median(text: str) -> float:
    """Of the loss: `median 0.4%, from …`."""
    return float(text.split("median ")[1].split("%")[0]) / 100


def tried(name: str, part: Callable[[], list[Check]], until: float) -> list[Check]:
    if time.monotonic() > until:
        return [Check(name, "not tried: the limit was over", False)]
    try:
        return part()
    except Exception as error:  # whatever fails in one part, the others go on
        traceback.print_exc()
        return [Check(name, f"{type(error).__name__}: {error}", False)]


def main() -> None:
    parts: dict[str, Callable[[Parts], list[Check]]] = {name: getattr(Parts, name) for name in PARTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers and shorter runs")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    parser.add_argument("--only", action="append", choices=parts, help="this part, and others so named")
    parser.add_argument("--limit", type=float, default=7200, help="seconds  [default: 7200]")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    here = Parts(args.output, args.quick, tuple(args.only or ()))
    until = time.monotonic() + args.limit
    rows = [row for name in args.only or parts for row in tried(name, partial(parts[name], here), until)]
    end_with(rows)


if __name__ == "__main__":
    main()

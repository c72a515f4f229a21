"""Whether kcap holds on architectures beside Llama: records each, replays it, compares with the engine, exports it.

    python scripts/gpu/zoo.py [NAME]… [--framework SGLang] [--engine-arg KEY=VALUE]… [--jobs N] [--only STAGE]…
                              [--patience S] [--limit S] [--output DIR]

The stages are warm, which only fills the engine's caches of compiled code, record, fidelity, replay and export; the
last three also take Recordings that lie in DIR already. Record and fidelity measure time: there each model has a GPU
to itself. The others take N models at once on each GPU (`--jobs N`); where N is 1, warm is left out.

Each model is a configuration that kcap has (`capture/controller/models`), with dummy weights and a few of its layers;
those that need an adapter, pictures or sound are run by `zoo_programs.py`, sound in vLLM alone. Prints a table last, a
row for each model:

- covered: of the GPU time in the profiled steps, what is of recorded calls; at least 97 %
- families: of that time, what is in named families; at least 95 %
- replayed: of the counts, at least 95 %; every other kernel has its reason printed above the table
- fidelity: the largest deviation of a kind of step, and how many kinds are within their bounds
- verified: of the Definitions that can be checked, those that agree with the recorded operator; at least 95 %

On a CPU, which knows no coverage and no fidelity, it tells the other three, of two layers and without compilation. A
model that the engine cannot run says so in the engine's own words. Exits with 1 unless every model reaches every
figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from marks import mark

import kcap
from kcap.errors import DONE, FAILED, PARTIAL
from kcap.show.summary import NO_FAMILY, of_recording

PROMPTS, ANSWER = "1,12", "24"  # how many, and the tokens of each answer: two loads
ON_CPU = ("--num-prompts", "1,4", "--input-len", "96,24", "--output-len", "6", "--eager")
# Prompts do not fit into one step, so that some steps mix them with decodes; few sizes are captured, to start sooner.
MEMORY = (f"kv_cache_memory_bytes={4 << 30}", "gpu_memory_utilization=0.1")  # of several on a GPU none can measure it
SERVING = {
    "vLLM": (
        *MEMORY,
        "max_num_batched_tokens=2048",
        "max_num_seqs=32",
        'compilation_config={"cudagraph_capture_sizes":[1,4,16]}',
    ),
    "SGLang": (
        "max_total_tokens=65536",
        "max_mamba_cache_size=64",
        "chunked_prefill_size=2048",
        "max_running_requests=32",
        "cuda_graph_bs_decode=[1,4,12,16]",
        "cuda_graph_bs_prefill=[512,2048]",
        "sampling_backend=pytorch",
    ),
}
NO_WARM_UP = {  # which compiles DeepGEMM for sizes that are not run here
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
}
STAGES = ("warm", "record", "fidelity", "replay", "export")
MEASURED = ("record", "fidelity")  # time is, so each needs a GPU to itself
LEAST = {"covered": 0.97, "families": 0.95, "replayed": 0.95, "verified": 0.95}


@dataclass(frozen=True)
class Model:
    """A model of the zoo. `arguments`: KEY=VALUE of vLLM on a GPU; `environment`: its variables; `program`: which of
    zoo_programs.py runs it instead.
    """

    id: str
    layers: int
    stands_for: str
    arguments: tuple[str, ...] = ()
    program: str | None = None
    input_len: str = "1024,320"
    environment: Mapping[str, str] = field(default_factory=dict)


# What vLLM chooses on Hopper for unquantized experts, prefills of gated delta nets and products of FP8 by blocks are
# FlashInfer's, which are compiled for minutes first (experts: over eight) where its wheel of them is not installed.
# This is what it has beside them; what it chooses is NAME-default.
TRITON = ("moe_backend=triton",)
TRITON_DELTA = ('additional_config={"gdn_prefill_backend":"triton"}',)
DEEP_GEMM = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
ZOO = {
    "qwen3-next": Model("Qwen/Qwen3-Next-80B-A3B-Instruct", 4, "gated delta nets, experts", TRITON + TRITON_DELTA),
    "deepseek-v3": Model("deepseek-ai/DeepSeek-V3", 4, "MLA, grouped routing, FP8 by blocks", environment=DEEP_GEMM),
    "deepseek-v2": Model("deepseek-ai/DeepSeek-V2-Lite", 4, "MLA, shared experts", TRITON),
    "gpt-oss": Model("openai/gpt-oss-20b", 4, "MXFP4 experts, sinks"),
    "falcon-h1": Model("tiiuae/Falcon-H1-7B-Base", 4, "Mamba-2 beside attention"),
    "mamba-2": Model("mistralai/Mamba-Codestral-7B-v0.1", 4, "state space, chunked scan"),
    "mamba": Model("state-spaces/mamba-2.8b-hf", 4, "state space, selective scan"),
    "gemma-2": Model("google/gemma-2-9b", 4, "softcap, sliding window"),
    "fp8-block": Model("Qwen/Qwen3-8B-FP8", 4, "FP8 by blocks", environment=DEEP_GEMM),
    "awq": Model("Qwen/Qwen2.5-7B-Instruct-AWQ", 4, "4-bit weights"),
    "lora": Model("meta-llama/Llama-3.1-8B", 4, "LoRA adapters", program="lora"),
    "vision": Model("Qwen/Qwen2.5-VL-7B-Instruct", 4, "vision encoder", program="vision"),
    "speech": Model("openai/whisper-large-v3", 4, "encoder and decoder", program="speech"),
    "embedding": Model("BAAI/bge-large-en-v1.5", 4, "pooling, no decoder", input_len="448,320"),
    "opt": Model("facebook/opt-6.7b", 4, "layer norms, biases"),
    "qwen3-moe": Model("Qwen/Qwen3-30B-A3B", 4, "experts, Triton backend", TRITON),
    "qwen3-moe-default": Model("Qwen/Qwen3-30B-A3B", 4, "experts by FlashInfer"),
    "qwen3-next-default": Model("Qwen/Qwen3-Next-80B-A3B-Instruct", 4, "gated delta nets, experts by FlashInfer"),
    "fp8-block-default": Model("Qwen/Qwen3-8B-FP8", 4, "FP8 by blocks, few rows by FlashInfer"),
}


@dataclass
class Findings:
    """What was found of a model. `figures`: shares by the name of their column; `notes`: in words, above the table."""

    name: str
    figures: dict[str, float | None] = field(default_factory=dict)
    worst_error: float | None = None  # of a kind of step, the better of serving and Program
    kinds: int | None = None
    kinds_within: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    gpu: str = ""  # that its stage runs on

    @property
    def passed(self) -> bool:
        reached = all(share is not None and share >= LEAST[what] for what, share in self.figures.items())
        compared = self.kinds is None or self.kinds_within == self.kinds > 0
        return not self.failure and reached and compared and bool(self.figures or self.kinds)

    def row(self) -> str:
        shares = (self.figures.get(column) for column in LEAST)
        cells = [f"{'·' if share is None else f'{share:.1%}':>9}" for share in shares]
        fidelity = "·" if self.kinds is None else f"{self.kinds_within} of {self.kinds}"
        fidelity += "" if self.worst_error is None else f", {self.worst_error:.1%}"
        cells.insert(3, f"{fidelity:>15}")
        return f"{self.name:12} {' '.join(cells)} {sum(self.seconds.values()):7.0f} s  {self.failure}".rstrip()


class Zoo:
    """Runs a stage for one model; Recordings and datasets lie in `output`. `gpus`: how many there are; `given`:
    KEY=VALUE for the engine of every model."""

    def __init__(
        self, output: Path, until: float, patience: float, gpus: int, framework: str = "vLLM", given: Sequence[str] = ()
    ) -> None:
        self.framework, self.given = framework, given
        self.output, self.until, self.patience, self.gpus = output, until, patience, gpus

    def run(self, every: Sequence[Findings], stage: str, jobs: int) -> None:
        """The `stage` for all that no earlier one failed for, `jobs` at once on each GPU."""
        gpus: SimpleQueue[str] = SimpleQueue()
        for job in range(jobs * max(self.gpus, 1)):
            gpus.put(str(job % self.gpus) if self.gpus else "")
        with ThreadPoolExecutor(gpus.qsize()) as pool:
            list(pool.map(lambda findings: self._run(findings, stage, gpus), every))

    def _run(self, findings: Findings, stage: str, gpus: SimpleQueue[str]) -> None:
        if findings.failure:
            return
        if time.monotonic() > self.until:
            findings.failure = f"{stage}: not tried, the limit was over"
            return
        began, findings.gpu = time.monotonic(), gpus.get()
        try:
            getattr(self, stage)(findings)
        except Exception as error:  # the others go on
            findings.failure = f"{stage}: {type(error).__name__}: {error}"
        gpus.put(findings.gpu)
        findings.seconds[stage] = round(time.monotonic() - began)
        print(f"{findings.name}: {stage} took {findings.seconds[stage]} s  {findings.failure}", flush=True)

    def recording(self, name: str) -> Path:
        return self.output / f"{name}.kcap"

    def warm(self, findings: Findings) -> None:
        self._start(findings, self.recording(f"{findings.name}-warm"))

    def record(self, findings: Findings) -> None:
        path = self.recording(findings.name)
        coverage = ("--check-coverage",) if self.gpus else ()
        done = self._start(findings, path, *coverage)
        (self.output / f"{findings.name}.record.txt").write_text(done.stdout + done.stderr)
        note_if_none(findings, path, done)

    def shares(self, findings: Findings) -> None:
        """What the Recording itself says: how much of the time it covers, and how much is in named families."""
        path = self.recording(findings.name)
        if not (path / "recording.json").is_file():
            return
        recording = kcap.load(path)
        taps = [f"tap {tap.name}: {tap.detail}" for tap in recording.metadata.taps if tap.status == "failed"]
        findings.notes += [*taps, *recording.metadata.notes]
        if self.gpus:
            share = (recording.metadata.coverage or {}).get("share")
            findings.figures["covered"] = share
            if share is not None and share < LEAST["covered"]:
                findings.notes.append(f"coverage: {json.dumps(recording.metadata.coverage)[:1500]}")
        summary = of_recording(recording, "family")
        times = {row.name: row.gpu_us if self.gpus else row.estimated_us for row in summary.rows}
        total = sum(times.values())
        if not total:
            findings.failure = "record: nothing was counted"
            return
        findings.figures["families"] = 1 - times.get(NO_FAMILY, 0.0) / total
        families = derived_families(recording)
        operators: Counter[str] = Counter()
        for row in of_recording(recording, "kernel").rows:
            if row.count and families.get(row.key, NO_FAMILY) == NO_FAMILY:  # families are of what was counted
                operators[row.name] += row.gpu_us if self.gpus else row.estimated_us
        findings.notes += [f"in no family: {us / total:6.2%}  {name}" for name, us in operators.most_common(12)]

    def replay(self, findings: Findings) -> None:
        done = self._kcap(
            findings, "replay", str(self.recording(findings.name)), "--trust", "--json", "--seconds", "0.02"
        )
        if done.returncode not in (DONE, FAILED, PARTIAL):
            findings.failure = f"replay: {done.stderr.strip()[-300:]}"
            return
        found = json.loads(done.stdout)
        findings.figures["replayed"] = found["replayed"]["share"]
        for part in ("skipped", "failed"):
            for reason in found[part]["reasons"]:
                findings.notes.append(f"{part}: {json.dumps(reason)[:400]}")

    def fidelity(self, findings: Findings) -> None:
        if not self.gpus:
            return
        done = self._kcap(
            findings, "replay", str(self.recording(findings.name)), "--compare-engine", "--trust", "--json"
        )
        if done.returncode not in (DONE, PARTIAL):
            findings.failure = f"fidelity: {done.stderr.strip()[-300:]}"
            return
        found = json.loads(done.stdout)
        (self.output / f"{findings.name}.fidelity.json").write_text(done.stdout)
        kinds = found["kinds"]
        errors = [min(state["error"] for state in kind["states"].values()) for kind in kinds]
        findings.kinds, findings.worst_error = len(kinds), max(errors, default=None)
        findings.kinds_within = sum(not kind["outside"] for kind in kinds)
        for kind in kinds:
            findings.notes += [f"{kind_name(kind)}: {line}" for line in kind["outside"]]

    def export(self, findings: Findings) -> None:
        dataset = self.output / f"{findings.name}.dataset"
        words = ("--to", "flashinfer-bench", "-o", str(dataset), "--allow-truncated", "--trust", "--force")
        done = self._kcap(findings, "export", str(self.recording(findings.name)), *words)
        if done.returncode not in (DONE, PARTIAL):
            findings.failure = f"export: {done.stderr.strip()[-300:]}"
            return
        lines = [json.loads(line) for line in (dataset / "checks.jsonl").read_text().splitlines()]
        status = Counter(line["status"] for line in lines)
        checked = sum(status[word] for word in ("agrees", "differs", "failed"))
        findings.figures["verified"] = status["agrees"] / checked if checked else None
        for line in lines:
            if line["status"] != "agrees":
                findings.notes.append(f"{line['status']}: {line['definition']}: {str(line.get('reason'))[:300]}")

    def _start(self, findings: Findings, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        """A start of the engine and its load, recorded into `path`."""
        model = ZOO[findings.name]
        layers = model.layers if self.gpus else 2
        log = self.output / f"{findings.name}.log"
        if model.program:
            program = str(Path(__file__).with_name("zoo_programs.py"))
            words = ["--", sys.executable, program, model.program, model.id, str(layers)]
            words += ["--framework", self.framework]
            serving = MEMORY if self.framework == "vLLM" else SERVING[self.framework]
            arguments = (*(serving if self.gpus else ()), *self.given)
        else:
            own = model.arguments if self.framework == "vLLM" and self.gpus else ()
            arguments = (*own, *(SERVING[self.framework] if self.gpus else ()), *self.given)
            load = ("--num-prompts", PROMPTS, "--input-len", model.input_len, "--output-len", ANSWER)
            words = ["--framework", self.framework, "--model", model.id, "--load-format", "dummy"]
            words += ["--num-layers", str(layers)]
            words += [*(load if self.gpus else ON_CPU), "--engine-log", str(log)]
        words += [word for argument in arguments for word in ("--engine-arg", argument)]
        return self._kcap(findings, "record", *options, "-o", str(path), "--force", *words)

    def _kcap(self, findings: Findings, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kcap", *words]
        left = max(min(self.until - time.monotonic(), self.patience), 1)
        visible = {"CUDA_VISIBLE_DEVICES": findings.gpu} if self.gpus > 1 else {}
        environment = os.environ | ZOO[findings.name].environment | visible
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
        ) as process:
            try:
                output, errors = process.communicate(timeout=left)
                return subprocess.CompletedProcess(command, process.returncode, output, errors)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with its engine and that one's compilers
                return subprocess.CompletedProcess(command, 124, "{}", f"it was not done after {left:.0f} s")


def note_if_none(findings: Findings, path: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Without a Call in the Recording at `path` the model has failed; the engine's last words become notes."""
    if not (path / "recording.json").is_file() or not kcap.load(path).calls:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        findings.notes += [line[:400] for line in said[-12:]]
        findings.failure = f"not recorded (status {done.returncode}): {said[-1][:160]}"


def derived_families(recording: kcap.Recording) -> dict[str, str]:
    """The family of each Call that has one, by the key of its row."""
    from kcap.schemas.derive.derive import derive
    from kcap.schemas.recording.signature import call_key

    families = derive(recording).family_of()
    return {call_key(call): families[call.id] for call in recording.kernels() if call.id in families}


def kind_name(kind: dict[str, Any]) -> str:
    return " ".join(str(kind[part]) for part in ("phase", "sequences", "tokens", "mode") if part in kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ZOO)}")
    parser.add_argument("--framework", choices=SERVING, default="vLLM")
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="of every model's engine"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models at once on each GPU, where no time is measured")
    parser.add_argument("--only", action="append", choices=STAGES)
    parser.add_argument("--patience", type=float, default=600, help="seconds for one stage  [default: 600]")
    parser.add_argument("--limit", type=float, default=7200, help="seconds  [default: 7200]")
    parser.add_argument("--output", type=Path, default=Path("gpu-check/zoo"))
    args = parser.parse_args()
    if unknown := set(args.names) - set(ZOO):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(ZOO)}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name, value in NO_WARM_UP.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine admits a load whole, not as it arrives
    gpus = torch.cuda.device_count()
    until = time.monotonic() + args.limit
    zoo = Zoo(args.output.resolve(), until, args.patience, gpus, args.framework, args.engine_arg)
    every = [Findings(name) for name in args.names or ZOO]
    for stage in args.only or (STAGES if args.jobs > 1 else STAGES[1:]):
        zoo.run(every, stage, 1 if stage in MEASURED else args.jobs)
    for findings in every:
        try:
            zoo.shares(findings)
        except Exception as error:  # the others go on
            findings.failure = findings.failure or f"shares: {type(error).__name__}: {error}"
        print(f"\n{findings.name}: {ZOO[findings.name].stands_for}", *findings.notes, sep="\n    ")
    heads = [f"{name:>9}" for name in LEAST]
    heads.insert(3, f"{'fidelity':>15}")
    print(f"\n    {'':12} {' '.join(heads)}")
    for findings in every:
        print(f"{mark(findings.passed)} {findings.row()}")
    sys.exit(not all(findings.passed for findings in every))


if __name__ == "__main__":
    main()

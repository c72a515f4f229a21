"""Engines of several ranks on several GPUs: recorded, replayed as a group, judged on all, plans applied to all.

    python scripts/gpu/parallel.py [--ranks N] [--only PART]… [--engine-arg KEY=VALUE]… [--limit S] [--patience S]
                                   [--output DIR]

Parts, in this order:

- `tensor`, `nccl`: Llama-3.1-8B's configuration, tensor parallel over N ranks (4 where there are as many GPUs, else 2),
  with vLLM's custom all-reduce and without; `experts`: Qwen3-30B-A3B's with its experts spread over them; `pipeline`,
  `data`, `data-experts`: two stages, and two replicas of each model; `sglang-tensor`, `sglang-nccl`,
  `sglang-data-attention`: the same Llama in SGLang, with its custom all-reduce and without, and Qwen3-30B-A3B with
  attention in data parallel and experts in tensor parallel over two ranks. Of each rank what the architecture says
  (`ranks.py`), the share of GPU time that is explained, and the collectives with their group and bytes.
- `overhead`: throughput with and without recording, in alternating pairs, of the engine of `tensor`, here with all of
  the model's layers: with few of them runs without recording differ by a fifth; `sglang-overhead`: SGLang's steps,
  recorded and not
- `fused`, only where asked for: the engine of `tensor` with FlashInfer's kernel of an all-reduce with its norm, which
  vLLM would use on Hopper and compiles for minutes at the first start (`--patience 500`): recorded, replayed, verified
- `replay`: collectives timed as a group, a rank's Programs with theirs, and how far they are from the engine
- `verify`: the Definitions of collectives, each reference against the recorded operator
- `bench`: Workloads that are judged in a second, on one GPU and on all
- `ray`: the same over two Ray nodes, each with half of the GPUs; a judge is killed, then a node is: nothing is lost
- `apply`: a plan in every rank

The last five take the Recording of `tensor`; Recordings that lie in DIR already are not made anew. Each command has
`--patience` seconds (350: the comparison with the engine takes most of them), the whole `--limit` (570); a part that
fails costs its own lines alone. Each line is in DIR/parallel.jsonl as soon as its part is over, what `kcap record` said
in DIR/PART.log; a short table is printed last. Exits with 1 if a check fails. SGLang's interpreter is
KCAP_SGLANG_PYTHON, .venv-sglang's or this one. Without GPUs it is two ranks on two cores, with gloo and vLLM's shared
memory: there it knows no coverage, no distance from the engine, no experts and no attention in data parallel. NVLink
multicast stays off, and but in `fused` symmetric memory and FlashInfer's kernel do, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from apply import chosen, examples_of, references_of
from check import ended, median, run, tried
from counts import Check, end_with
from marks import mark
from ranks import (
    REDUCED_ALONE,
    TINY,
    Setup,
    check_applied,
    check_collectives,
    check_coverage,
    check_programs,
    check_ranks,
    interpreter,
    setups,
)

import kcap
from kcap.errors import DONE, PARTIAL
from kcap.schemas.results.outcome import Outcome, read_outcomes, read_reference_checks

SCRIPTS = Path(__file__).resolve().parents[1]
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # by which SGLang would gather logits
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
MOST_LOSS = 0.01  # of throughput
LEAST_GAIN = 0.875  # of N times the Workloads a second: 1.75 of 2, 3.5 of 4
SOLUTIONS, WORKLOADS = 4, 12  # that are judged: on one H100 in some 110 s, compiling included
LACKS = "import importlib.util as util; raise SystemExit(util.find_spec('{}') is None)"  # of a Python: the engine


class Parts:
    """The parts, each of which answers its lines of the table. `gpus`: how many there are; `asked`: parts by name;
    `engine_args`: more of each recorded engine."""

    def __init__(
        self,
        output: Path,
        ranks: int,
        gpus: int,
        until: float,
        patience: float,
        asked: Sequence[str] = (),
        engine_args: Sequence[str] = (),
    ) -> None:
        self.output, self.ranks, self.gpus, self.until, self.patience = output, ranks, gpus, until, patience
        self.asked, self.engine_args = asked, engine_args
        self.setups = setups(ranks, gpus > 0)
        recordings = {name: partial(self.recorded, name) for name in self.setups}
        others = {"overhead": self.overhead, "sglang-overhead": self.sglang_overhead}
        others |= {part.__name__: part for part in (self.replay, self.verify, self.bench, self.ray, self.apply)}
        self.all: dict[str, Callable[[], list[Check]]] = recordings | others
        if "fused" in recordings:
            self.all["fused"] = self.fused
        self.tensor = output / "tensor.kcap"

    def kcap(self, *words: object) -> Any:
        return self.run(sys.executable, "-m", "kcap", *words)

    def run(self, *words: object) -> Any:
        """A command within what is left of the time."""
        left = max(min(self.until - time.monotonic(), self.patience), 1)
        return run(*map(str, words), timeout=left)

    def recorded(self, name: str) -> list[Check]:
        path, setup, rows = self.output / f"{name}.kcap", self.setups[name], []
        if not (path / "recording.json").is_file():
            python = interpreter(setup.framework, self.gpus > 0)
            if missing := self.missing(name, setup.framework):
                return missing
            done = self.run(*python, "-m", "kcap", "record", *self.recording(setup, path))
            path.with_suffix(".log").write_text(done.stdout + done.stderr)
            rows = [Check("record", f"status {done.returncode}", done.returncode == 0)]
        if not (path / "recording.json").is_file():
            return rows
        recording = kcap.load(path)
        return [*rows, *check_ranks(recording, setup), *(check_coverage(recording) if self.gpus else [])]

    def missing(self, part: str, framework: str) -> list[Check]:
        """A line, where the interpreter of a part lacks the engine."""
        python = interpreter(framework, self.gpus > 0)
        if not self.run(*python, "-c", LACKS.format(framework.lower())).returncode:
            return []
        return [Check("record", f"not tried: {python[-1]} has no {framework}", part not in self.asked)]

    def recording(self, setup: Setup, path: Path, *more: object) -> list[object]:
        """The words of `kcap record`."""
        load = ("--num-prompts", 16, "--input-len", 256, "--output-len", 32)
        load = load if self.gpus else ("--num-prompts", 2, "--input-len", 24, "--output-len", 4)
        options = ["-o", path, "--force", *(["--check-coverage"] if self.gpus else []), *more]
        arguments = [*setup.arguments, *(setup.serving() if self.gpus else ()), *self.engine_args]
        if setup.replicas > 1:
            program = Path(__file__).with_name("replicas.py")
            words = [setup.model, setup.layers, setup.replicas, *(["--eager"] if setup.eager else []), *arguments]
            return [*options, "--", sys.executable, program, *words]
        words = ["--framework", setup.framework, "--model", setup.model, "--load-format", "dummy"]
        words += ["--num-layers", setup.layers, *load]
        words += [word for argument in arguments for word in ("--engine-arg", argument)]
        return [*options, *words, *(["--eager"] if setup.eager else [])]

    def overhead(self) -> list[Check]:
        setup = self.setups["tensor"]
        words: list[object] = ["--model", setup.model, *([] if self.gpus else ["--num-layers", setup.layers])]
        words += [word for argument in setup.arguments for word in ("--engine-arg", argument)]
        sizes = {"--seconds": 1} | ({"--batch": 16, "--pairs": 21} if self.gpus else {"--batch": 2, "--pairs": 1})
        words += [word for size in sizes.items() for word in size]
        compiled = ("--compiled", "--engine-arg", f"compilation_config={{{REDUCED_ALONE}}}")
        words += compiled if self.gpus else ("--input-len", 24)
        done = self.run(sys.executable, SCRIPTS / "gpu/overhead.py", *words)
        said = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("throughput")]
        return ended("ended", done, [Check("loss", text, not self.gpus or median(text) <= MOST_LOSS) for text in said])

    def sglang_overhead(self) -> list[Check]:
        if missing := self.missing("sglang-overhead", "SGLang"):
            return missing
        words: list[object] = ["--ranks", self.ranks, "--most", 100 * MOST_LOSS if self.gpus else 100]
        words += [] if self.gpus else ["--model", TINY, "--batch", 2, "--steps", 90]
        done = self.run(*interpreter("SGLang", self.gpus > 0, script=True), SCRIPTS / "gpu/sglang_overhead.py", *words)
        lines = [line for line in done.stdout.splitlines() if "throughput lost" in line]
        said = [(line.startswith(mark(True)), line.split(": ", 1)[1]) for line in lines]
        return ended("ended", done, [Check("loss", text, passed) for passed, text in said])

    def fused(self) -> list[Check]:
        path = self.output / "fused.kcap"
        return [*self.recorded("fused"), *self.collectives(path), *self.references(path)]

    def collectives(self, recording: Path) -> list[Check]:
        measured = recording.with_suffix(".measurements.jsonl")
        options = ("--trust", "--op", "*all*", "--seconds", 0.05, "-o", measured, "--force")
        done = self.kcap("replay", recording, *options)
        if not measured.is_file():
            return [Check("collectives", f"status {done.returncode}", False)]
        return check_collectives(measured, self.ranks)

    def replay(self) -> list[Check]:
        rows, programs = self.collectives(self.tensor), self.tensor.with_suffix(".programs.jsonl")
        whole = self.kcap("replay", self.tensor, "--trust", "--program", "--phase", "decode", "-o", programs, "--force")
        if not programs.is_file():
            return [*rows, Check("Programs", f"status {whole.returncode}", False)]
        rows += check_programs(programs, self.ranks)
        return [*rows, *self.fidelity()] if self.gpus else rows

    def fidelity(self) -> list[Check]:
        done = self.kcap("replay", self.tensor, "--compare-engine", "--trust", "--json")
        if done.returncode not in (DONE, PARTIAL):
            return [Check("beside the engine", f"status {done.returncode}", False)]
        rows = []
        for kind in json.loads(done.stdout)["kinds"]:
            error = min(state["error"] for state in kind["states"].values())
            what = f"{kind['phase']}, {kind['sequences']} sequences, beside the engine"
            rows.append(Check(what, f"{error:.1%}; {'; '.join(kind['outside'])}", not kind["outside"]))
        return rows or [Check("beside the engine", "no step was compared", False)]

    def verify(self) -> list[Check]:
        return self.references(self.tensor)

    def references(self, recording: Path) -> list[Check]:
        dataset = recording.with_suffix(".dataset")
        options = ("--to", "flashinfer-bench", "--allow-truncated", "--trust", "--force")
        done = self.kcap("export", recording, *options, "-o", dataset)
        if not (dataset / "checks.jsonl").is_file():
            return [Check("export", f"status {done.returncode}", False)]
        checks = [one for one in read_reference_checks(dataset / "checks.jsonl") if "_ws" in one.definition]
        found = [
            Check(one.definition, f"{one.status} {one.reason or ''}".strip(), one.status == "agrees") for one in checks
        ]
        return found or [Check("Definitions of collectives", "none", False)]

    def bench(self) -> list[Check]:
        rates = {}
        for device in ("cuda:0", "cuda") if self.gpus else ("cpu",):
            judged = self.output / f"judged-{device.replace(':', '')}"
            done = self.kcap("bench", *self.judging(judged), "--device", device)
            outcomes = list(read_outcomes(judged / "outcomes.jsonl"))
            if done.returncode not in (DONE, PARTIAL) or not once(outcomes):
                return [Check(f"bench on {device}", f"status {done.returncode}, {len(outcomes)} Outcomes", False)]
            rates[device] = rate(outcomes)
        rows = [Check(f"judged a second on {device}", f"{found:.2f}", True) for device, found in rates.items()]
        if not self.gpus:
            return rows
        gain = rates["cuda"] / rates["cuda:0"]
        return [*rows, Check("gain", f"{gain:.2f} times on {self.gpus} GPUs", gain >= LEAST_GAIN * self.gpus)]

    def judging(self, judged: Path) -> list[object]:
        """The words of `kcap bench` on small Solutions and Workloads."""
        root = self.output / "judging"
        if not root.exists():
            sys.path.insert(0, str(SCRIPTS))
            from judge_throughput import write_problem

            write_problem(root, *((SOLUTIONS, WORKLOADS) if self.gpus else (4, 2)))
        options = ("--seconds", 0.02, "--trust", "--force", *(() if self.gpus else ("--threads", 1)))
        return [root / "dataset", "--solutions", root / "solutions", "-o", judged, *options]

    def ray(self) -> list[Check]:
        from ray.cluster_utils import Cluster

        judged = self.output / "judged-ray"
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
        )
        try:
            nodes = [self.add_node(cluster, half) for half in (0, 1)]
            os.environ["RAY_ADDRESS"] = cluster.address
            harm = threading.Thread(target=harm_judges, args=(cluster, nodes, judged / "outcomes.jsonl", self.until))
            harm.start()
            device = "cuda" if self.gpus else "cpu"
            done = self.kcap("bench", *self.judging(judged), "--device", device, "--executor", "ray")
            harm.join()
        finally:
            os.environ.pop("RAY_ADDRESS", None)
            cluster.shutdown()
        outcomes = list(read_outcomes(judged / "outcomes.jsonl")) if judged.is_dir() else []
        statuses = Counter(one.status for one in outcomes)
        said = [line for line in done.stderr.splitlines() if "judged again" in line or "cannot be started" in line]
        whole = done.returncode in (DONE, PARTIAL) and once(outcomes) and len(outcomes) == self.pairs()
        return [
            Check(
                "Outcomes", f"{len(outcomes)} of {self.pairs()}, {dict(statuses)}", whole and not statuses["NOT_JUDGED"]
            ),
            Check("what was lost is said", " / ".join(said)[:300] or "nothing", bool(said)),
        ]

    def add_node(self, cluster: Any, half: int) -> Any:
        if not self.gpus:
            return cluster.add_node(num_cpus=2)
        own = range(self.gpus)[half * self.gpus // 2 : (half + 1) * self.gpus // 2]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
        return cluster.add_node(num_cpus=len(own), num_gpus=len(own), env_vars=visible)

    def pairs(self) -> int:
        """Of Solutions and Workloads."""
        solutions = len(list((self.output / "judging/solutions").iterdir()))
        (workloads,) = (self.output / "judging/dataset/workloads").rglob("*.jsonl")
        return solutions * len(workloads.read_text().splitlines())

    def apply(self) -> list[Check]:
        recording, setup = kcap.load(self.tensor), self.setups["tensor"]
        folder, judged, plan = (self.output / name for name in ("solutions", "judged-plan", "plan.json"))
        measured = self.tensor.with_suffix(".cold.jsonl")
        state = ("--cache", "cold") if self.gpus else ("--threads", 1)
        self.kcap(
            "replay", self.tensor, "--trust", "--phase", "decode", "--seconds", 0.02, *state, "-o", measured, "--force"
        )
        folder.mkdir(exist_ok=True)
        texts = dict(examples_of(recording)) if self.gpus else {}
        if not texts:
            for kernel in chosen(recording, 1, measured):
                texts |= references_of(kernel)
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        options = ("--measurements", measured, "--trust", "--force", *(() if self.gpus else ("--threads", 1)))
        self.kcap("bench", self.tensor, "--solutions", folder, "-o", judged, "--workloads", 1, *options)
        words = ("--solutions", judged, "--measurements", measured, "--slower", "-o", plan, "--force")
        if (done := self.kcap("apply", self.tensor, *words)).returncode or not plan.is_file():
            return [Check("plan", f"status {done.returncode}", False)]
        applied = self.output / "applied.kcap"
        done = self.kcap("record", *self.recording(setup, applied, "--plan", plan))
        rows = [Check("record with the plan", f"status {done.returncode}", done.returncode == 0)]
        return (
            [*rows, *check_applied(kcap.load(applied), setup.ranks)] if (applied / "recording.json").is_file() else rows
        )


def once(outcomes: Sequence[Outcome]) -> bool:
    """Whether there are some, and each is of another pair."""
    return len({(one.solution, one.workload) for one in outcomes}) == len(outcomes) > 0


def rate(outcomes: Sequence[Outcome]) -> float:
    """Outcomes a second while all devices are at work: from when each has judged its first, until one has no more."""
    by_device = defaultdict(list)
    for one in outcomes:
        began = datetime.fromisoformat(one.timestamp).timestamp()
        by_device[one.device].append((began, began + one.seconds))
    if not by_device:
        return 0.0
    start = max(min(ended for _, ended in judged) for judged in by_device.values())
    end = min(max(ended for _, ended in judged) for judged in by_device.values())
    spans = [
        (max(began, start), min(ended, end), ended - began) for each in by_device.values() for began, ended in each
    ]
    parts = sum((until - since) / max(whole, 1e-3) for since, until, whole in spans if until > since)
    return parts / max(end - start, 1.0)


def harm_judges(cluster: Any, nodes: Sequence[Any], outcomes: Path, until: float) -> None:
    """Kill a judge's actor when the first Outcome is there, and its node after two more."""

    def wait_for(number: int) -> None:
        while time.monotonic() < until:
            if outcomes.is_file() and len(outcomes.read_text().splitlines()) >= number:
                return
            time.sleep(0.2)

    wait_for(1)
    actors = {process: node for node in nodes for process in judges_of(node.all_processes["raylet"][0].process.pid)}
    for process, node in list(actors.items())[:1]:
        os.kill(process, signal.SIGKILL)
        wait_for(3)
        cluster.remove_node(node, allow_graceful=False)


def judges_of(raylet: int) -> Iterator[int]:
    """The processes of actors on a node."""
    for file in Path(f"/proc/{raylet}/task").glob("*/children"):
        for process in file.read_text().split():
            if b"JudgeActor" in Path(f"/proc/{process}/cmdline").read_bytes():
                yield int(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=4 if gpus >= 4 else 2)
    parser.add_argument("--only", action="append", help="this part, and others so named")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="of what is recorded")
    parser.add_argument("--limit", type=float, default=570, help="seconds of all  [default: 570]")
    parser.add_argument("--patience", type=float, default=350, help="seconds of a command  [default: 350]")
    parser.add_argument("--output", type=Path, default=Path("parallel"))
    args = parser.parse_args()
    if gpus == 1:
        parser.error("one GPU has no peers: run it where there are more, or none (CUDA_VISIBLE_DEVICES=)")
    os.environ |= QUIET
    if not gpus:
        cores = sorted(os.sched_getaffinity(0))
        for engine in ("VLLM", "SGLANG"):
            os.environ[f"{engine}_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[: args.ranks]))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; else replicas take nearly all memory, each
    args.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit
    parts = Parts(args.output.resolve(), args.ranks, gpus, until, args.patience, args.only or (), args.engine_arg)
    for name in set(args.only or ()) - set(parts.all):
        parser.error(f"--only {name}: none of {', '.join(parts.all)}")
    rows = []
    for name in args.only or (name for name in parts.all if name != "fused"):
        for row in tried(name, parts.all[name], until):
            rows.append(Check(f"{name}: {row.what}", row.found, row.passed))
            with (args.output / "parallel.jsonl").open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
    end_with(rows)


if __name__ == "__main__":
    main()

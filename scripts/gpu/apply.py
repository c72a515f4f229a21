"""What Solutions gain in the engine, beside what the judge predicts: for kernels of every seam that there is.

    python scripts/gpu/apply.py [--model ID] [--layers N] [--kernels N] [--output DIR]

Records the model as vLLM serves it, compiled and in CUDA graphs, and measures its kernels. Of each seam it takes the
Definitions that the engine spends most of its decode steps in, and makes two Solutions of each, without anybody's
ideas: the reference as it is, and the reference compiled by inductor. They are judged, and each is put into the engine
by a plan of its own, slower ones too; all plans are compared in one engine. What lies in DIR already is not made anew.

Prints a table last: the change of a decode step by the judge's times, the change that was measured with its interval,
and the share of steps that ran the Solution. Exits with 1 unless every Solution that was put in ran. On a CPU it takes
the tiny Llama, eagerly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kcap
from kcap.bench.apply.choice import Judged, Wishes, make_plan, read_judged
from kcap.bench.apply.trial import try_alone
from kcap.bench.apply.views import NoView, views_of
from kcap.commands.gain import known_times
from kcap.schemas.derive.derive import derive
from kcap.schemas.derive.kernel import DerivedDefinition
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.seam import seam_of
from kcap.schemas.results.plan import Plan, plan_bytes

COMPILED = """
_reference = torch.compile(run, dynamic=False)


def run({inputs}):
    return _reference({inputs})
"""
LOAD = ("--num-prompts", "16", "--input-len", "64")
GRAPHS = 'compilation_config={"cudagraph_capture_sizes":[1,16]}'
RECORDED, COMPARED = "32", "400"  # tokens of each answer


@dataclass(frozen=True)
class Row:
    """Of one plan. `predicted`, `measured`, `half`: shares of a decode step; None where they are not known."""

    plan: str
    seams: str
    predicted: float | None = None
    measured: float | None = None
    half: float | None = None
    held: float = 0.0
    failure: str = ""

    def text(self) -> str:
        cells = ["·" if share is None else f"{share:+.2%}" for share in (self.predicted, self.measured)]
        interval = "" if self.half is None else f" ± {self.half:.2%}"
        return f"{self.seams:9} {cells[0]:>9} {cells[1] + interval:>19} {self.held:6.0%}  {self.plan}  {self.failure}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B" if on_gpu else "kcap/tiny-llama")
    parser.add_argument("--layers", default="8" if on_gpu else "2")
    parser.add_argument("--kernels", type=int, default=2, help="Definitions of each seam")
    parser.add_argument("--output", type=Path, default=Path("applied"))
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(exist_ok=True)
    engine = ["--model", options.model, "--load-format", "dummy", "--num-layers", options.layers, *LOAD]
    engine += ["--engine-arg", GRAPHS] if on_gpu else ["--eager"]
    recording, judged = prepare(output, engine, options.kernels)
    plans = list(make_plans(recording, judged, output))
    compared = output / "compared.json"
    put_in = [output / f"{name}.plan.json" for name, plan, _ in plans if plan.replacements]
    if put_in:
        words = [word for file in put_in for word in ("--plan", str(file))]
        run("ab", *words, "--no-trial", *engine, "--output-len", COMPARED, "-o", str(compared), fails=True)
    found = {one["plan"]: one for one in json.loads(compared.read_text())["plans"]} if compared.exists() else {}
    rows = [row_of(name, plan, reason, found.get(str(output / f"{name}.plan.json"))) for name, plan, reason in plans]
    print(f"\n{'seam':9} {'predicted':>9} {'measured':>19} {'held':>6}  plan")
    for row in rows:
        print(row.text())
    return int(not rows or any(row.held == 0.0 and not row.failure for row in rows))


def run(*words: str, fails: bool = False) -> None:
    """Run kcap; with `fails` it may end with another status than 0."""
    print("$ kcap", *words, flush=True)
    subprocess.run([sys.executable, "-m", "kcap", *words], check=not fails)


def prepare(output: Path, engine: Sequence[str], kernels: int) -> tuple[Recording, Judged]:
    """The Recording, and what was judged of the Solutions made for it."""
    recorded, measured, judged = output / "model.kcap", output / "measurements.jsonl", output / "judged"
    if not recorded.exists():
        run("record", *engine, "--output-len", RECORDED, "-o", str(recorded))
    if not measured.exists():
        run("replay", str(recorded), "-o", str(measured), "--trust", fails=True)
    recording = kcap.load(recorded)
    if not (judged / "bench.json").exists():
        folder = output / "solutions"
        folder.mkdir(exist_ok=True)
        for kernel in chosen(recording, kernels):
            for name, text in solutions_of(kernel).items():
                (folder / f"{name}.py").write_text(text)
        options = ["--solutions", str(folder), "-o", str(judged), "--measurements", str(measured), "--workloads", "4"]
        run("bench", str(recorded), *options, "--trust", fails=True)
    return recording, read_judged(judged)


def chosen(recording: Recording, number: int) -> list[DerivedDefinition]:
    """Of each seam, so many Definitions of the most decode time whose inputs are views of what the engine passes."""
    times, _ = known_times(recording, recording.path.with_name("measurements.jsonl")) or ({}, "")
    found: dict[str, list[tuple[float, DerivedDefinition]]] = defaultdict(list)
    for kernel in derive(recording).kernels:
        uses = [use for use in kernel.uses if use.call.counted("decode") and use.call.id in times]
        seam = seam_of(uses[0].call) if uses else None
        if seam is None or "reference:operator" in kernel.definition.tags:  # it has no reference of its own
            continue
        try:
            views_of(kernel.definition, uses[0])
        except NoView:
            continue
        us = sum(use.call.counted("decode") * times[use.call.id].us.get("decode", 0.0) for use in uses)
        found[seam].append((us, kernel))
    best = [sorted(of_seam, key=lambda one: -one[0])[:number] for of_seam in found.values()]
    return [kernel for of_seam in best for _, kernel in of_seam]


def solutions_of(kernel: DerivedDefinition) -> dict[str, str]:
    """By name, the text of each Solution."""
    name, reference = kernel.definition.name, kernel.definition.reference
    plain = f"# definition: {name}\n{reference}"
    compiled = COMPILED.format(inputs=", ".join(kernel.definition.inputs))
    return {f"{name}_plain": plain, f"{name}_compiled": f"{plain}\n{compiled}"}


def make_plans(recording: Recording, judged: Judged, output: Path) -> Iterator[tuple[str, Plan, str]]:
    """Each Solution's name, the plan of it alone, which is written to `output`, and why it may be empty."""
    times, _ = known_times(recording, output / "measurements.jsonl") or ({}, "")
    for name in sorted({solution.name for solution in judged.solutions.values()}):
        plan = make_plan(recording, judged, times, Wishes([name], slower=True))
        plan = try_alone(plan, trust=True, slower=True) if plan.replacements else plan
        (output / f"{name}.plan.json").write_bytes(plan_bytes(plan))
        yield name, plan, plan.left_out[-1].reason if plan.left_out else ""


def row_of(name: str, plan: Plan, reason: str, compared: dict[str, Any] | None) -> Row:
    """`compared`: what was measured of the plan in the engine."""
    seams = ", ".join(sorted({one.seam for one in plan.replacements}))
    if not plan.replacements:
        return Row(name, "none", failure=reason)
    decode = [one for one in (compared or {}).get("compared", ()) if one["phase"] == "decode"]
    if not decode:
        return Row(name, seams, failure="not measured")
    most = max(decode, key=lambda one: one["steps"])
    us, difference = most["engine_us"], most["solutions"] or {}
    measured, half = (difference.get(of) and difference[of] / us for of in ("us", "half_interval_us"))
    return Row(name, seams, most["predicted_us"] / us, measured, half, most["held"])


if __name__ == "__main__":
    sys.exit(main())

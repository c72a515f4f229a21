"""What Solutions gain in the engine, beside what the judge predicts: for kernels of every seam that there is.

    python scripts/gpu/apply.py [--framework SGLang] [--engine-arg KEY=VALUE]… [--model ID] [--layers N] [--kernels N]
                                [--pairs N] [--output DIR]

Records the model as the engine serves it, compiled and in CUDA graphs, and measures its kernels. Of each seam it takes
the Definitions that the engine spends most of its decode steps in, and makes two Solutions of each, without anybody's
ideas: the reference as it is, and the reference compiled by inductor. On a GPU those in bench/solutions/examples are
Solutions, too, one of them also at half its pace. All are judged, and each is put into the engine by a plan of its own,
slower ones too; `chosen` is the plan that `kcap apply` makes of all of them, and `together` has an example for a
registered operator, for a kernel that inductor fused and for attention at once. More are to be found out: products and
attention that are wrong in one element of a thousand, which no judge would let pass, and one for a batch that never
comes. All plans are compared in one engine, the chosen one then in N pairs of fresh ones. What lies in DIR already is
not made anew.

Prints a table last: the change of a decode step by the judge's times, the change that was measured with its interval,
the share of steps that ran a Solution, and what the logits differ by. Exits with 1 unless every plan but the useless
one ran. On a CPU it takes the tiny Llama, eagerly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from kcap.schemas.recording.records import Call
from kcap.schemas.recording.seam import seam_of
from kcap.schemas.results.plan import Plan, plan_bytes

COMPILED = """
_reference = torch.compile(run, dynamic=False)


def run({inputs}):
    return _reference({inputs})
"""
EXAMPLES = {  # by what the name of a Definition begins with
    "gemm_bf16_": "gemm",
    "fused_add_rms_norm_bf16_": "add_rms_norm",
    "cache_update_": "cache_update",
    "greedy_sampling_": "argmax",
    "gqa_table_decode_h": "decode_attention",
}
TOGETHER_OF = ("gemm_bf16_", "fused_add_rms_norm_bf16_", "gqa_table_decode_h")
TWICE = """

_once = run


def run({arguments}):
    _once({arguments})
    _once({arguments})
"""
WRONG = """

_right = run


def run({arguments}):
    _right({arguments})
    {output}.view(-1)[::1000].neg_()
"""
SERVING = {
    "vLLM": ('compilation_config={"cudagraph_capture_sizes":[1,16]}',),
    "SGLang": ("cuda_graph_bs_decode=[1,16]", "cuda_graph_bs_prefill=[1280]", "sampling_backend=pytorch"),
}
LOAD = ("--num-prompts", "16")
RECORDED = ("--input-len", "64", "--output-len", "32")
COMPARED = ("--input-len", "80", "--output-len", "1200")  # in prefill it has shapes that were not recorded
PRODUCT = "aten::mm.out"
PRODUCTS = (PRODUCT, "aten::linear")
USELESS, CHOSEN, TOGETHER = "useless", "chosen", "together"


@dataclass(frozen=True)
class Row:
    """Of one plan. `predicted`, `measured`, `half`: shares of a decode step; None where they are not known. `logits`:
    what they differ by, over their root mean square."""

    plan: str
    seams: str
    predicted: float | None = None
    measured: float | None = None
    half: float | None = None
    held: float = 0.0
    logits: float | None = None
    failure: str = ""

    def text(self) -> str:
        cells = ["·" if share is None else f"{share:+.2%}" for share in (self.predicted, self.measured)]
        interval = "" if self.half is None else f" ± {self.half:.2%}"
        rms = "·" if self.logits is None else f"{self.logits:.2g}"
        measured = f"{cells[0]:>9} {cells[1] + interval:>19} {self.held:6.0%} {rms:>8}"
        return f"{self.seams:16} {measured}  {self.plan}  {self.failure}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--framework", choices=SERVING, default="vLLM")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B" if on_gpu else "kcap/tiny-llama")
    parser.add_argument("--layers", default="32" if on_gpu else "2")
    parser.add_argument("--kernels", type=int, default=2, help="Definitions of each seam")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of fresh engines")
    parser.add_argument("--output", type=Path, default=Path("applied"))
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(exist_ok=True)
    engine = ["--framework", options.framework, "--model", options.model, "--load-format", "dummy"]
    engine += ["--num-layers", options.layers, *LOAD, *(() if on_gpu else ("--eager",))]
    arguments = [*(SERVING[options.framework] if on_gpu else ()), *options.engine_arg]
    engine += [word for argument in arguments for word in ("--engine-arg", argument)]
    recording, judged = prepare(output, engine, options.kernels)
    plans = dict(tried_alone(dict(make_plans(recording, judged, output))))
    plans |= odd_ones(plans)
    for name, plan in plans.items():
        (output / f"{name}.plan.json").write_bytes(plan_bytes(plan))
    found = compared(output, [name for name, plan in plans.items() if plan.replacements], engine)
    rows = [row_of(name, plan, found.get(name)) for name, plan in plans.items()]
    fresh = {}
    if plans[CHOSEN].replacements and options.pairs:
        fresh = in_fresh_engines(output, engine, options.pairs)
    print(f"\n{'seam':16} {'predicted':>9} {'measured':>19} {'held':>6} {'logits':>8}  plan")
    for row in rows:
        print(row.text())
    if fresh:
        half = f" ± {fresh['half_interval']:.2%}" if fresh["half_interval"] else ""
        print(f"{CHOSEN} in {len(fresh['engine_us'])} pairs of fresh engines: {fresh['median_ratio'] - 1:+.2%}{half}")
    return int(not rows or any(row.held == 0.0 and not row.failure for row in rows if row.plan != USELESS))


def run(*words: str, fails: bool = False) -> None:
    """Run kcap; with `fails` it may end with another status than 0."""
    print("$ kcap", *words, flush=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "kcap", *words], check=not fails)
    print(f"kcap {words[0]} took {time.monotonic() - began:.0f} s", flush=True)


def prepare(output: Path, engine: Sequence[str], kernels: int) -> tuple[Recording, Judged]:
    """The Recording, and what was judged of the Solutions made for it."""
    recorded, measured, judged = output / "model.kcap", output / "measurements.jsonl", output / "judged"
    if not recorded.exists():
        run("record", *engine, *RECORDED, "-o", str(recorded))
    if not measured.exists():
        as_judged = ["--cache", "cold"] if torch.cuda.is_available() else ["--threads", "1"]
        run("replay", str(recorded), "-o", str(measured), *as_judged, "--trust", fails=True)
    recording = kcap.load(recorded)
    if not (judged / "bench.json").exists():
        folder = output / "solutions"
        folder.mkdir(exist_ok=True)
        texts = {
            name: text
            for kernel in chosen(recording, kernels, measured)
            for name, text in references_of(kernel).items()
        }
        texts |= dict(examples_of(recording)) if torch.cuda.is_available() else {}
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        options = ["--solutions", str(folder), "-o", str(judged), "--measurements", str(measured), "--workloads", "1"]
        options += [] if torch.cuda.is_available() else ["--threads", "1"]
        run("bench", str(recorded), *options, "--trust", fails=True)
    return recording, read_judged(judged)


def chosen(recording: Recording, number: int, measured: Path) -> list[DerivedDefinition]:
    """Of each seam, so many Definitions of the most decode time whose inputs are views of what the engine passes."""
    times, _ = known_times(recording, measured) or ({}, "")
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


def references_of(kernel: DerivedDefinition) -> dict[str, str]:
    """By name, the text of each Solution that is made of the reference."""
    name, reference = kernel.definition.name, kernel.definition.reference
    plain = f"# definition: {name}\n{reference}"
    compiled = COMPILED.format(inputs=", ".join(kernel.definition.inputs))
    return {f"{name}_plain": plain, f"{name}_compiled": f"{plain}\n{compiled}"}


def examples_of(recording: Recording) -> Iterator[tuple[str, str]]:
    """The name and text of each example that is for a Definition of the Recording; the first twice as slow, too."""
    folder = Path(kcap.__file__).parent / "bench" / "solutions" / "examples"
    twice = ""
    for definition in (kernel.definition for kernel in derive(recording).definitions):
        example = next((example for start, example in EXAMPLES.items() if definition.name.startswith(start)), None)
        if example is None or (example == "add_rms_norm" and len(definition.inputs) != 3):
            continue
        text = f"# definition: {definition.name}\n{(folder / f'{example}.py').read_text()}"
        yield f"{definition.name}_example", text
        if example == "gemm" and not twice:
            twice = text + TWICE.format(arguments=", ".join([*definition.inputs, *definition.outputs]))
            yield f"{definition.name}_twice", twice


def make_plans(recording: Recording, judged: Judged, output: Path) -> Iterator[tuple[str, Plan]]:
    """The plan that is chosen of all, one for each Solution alone and one of examples together, slower ones too."""
    times, _ = known_times(recording, output / "measurements.jsonl") or ({}, "")
    yield CHOSEN, make_plan(recording, judged, times, Wishes())
    names = sorted({solution.name for solution in judged.solutions.values()})
    alone = {name: make_plan(recording, judged, times, Wishes([name], slower=True)) for name in names}
    yield from alone.items()
    best = []
    for start in TOGETHER_OF:
        put_in = [n for n in names if n.startswith(start) and n.endswith("_example") and alone[n].replacements]
        best += [max(put_in, key=lambda name: alone[name].saved_us("decode"))] if put_in else []
    if len(best) == len(TOGETHER_OF):
        yield TOGETHER, make_plan(recording, judged, times, Wishes(best, slower=True))


def tried_alone(plans: dict[str, Plan]) -> Iterator[tuple[str, Plan]]:
    """The plans without the Solutions that fail alone: each Solution is tried once, in the place of each of its
    Calls."""
    each = {(one.solution, one.call.id): one for plan in plans.values() for one in plan.replacements}
    solutions = {sha256: solution for plan in plans.values() for sha256, solution in plan.solutions.items()}
    first = next(iter(plans.values()))
    whole = first.model_copy(update={"solutions": solutions, "replacements": list(each.values()), "left_out": []})
    tried = try_alone(whole, trust=True, slower=True) if each else whole
    for left in tried.left_out:
        print(left.text)
    kept = {(one.solution, one.call.id) for one in tried.replacements}
    for name, plan in plans.items():
        yield name, plan.only([one for one in plan.replacements if (one.solution, one.call.id) in kept], tried.left_out)


def odd_ones(plans: dict[str, Plan]) -> dict[str, Plan]:
    """Plans that are to be found out: a product and attention that are wrong, and a product for a batch that does not
    come."""
    odd = {}
    examples = [plan for name, plan in plans.items() if name.endswith("_example")]
    products = (plan for operator in PRODUCTS for plan in examples if operators_of(plan) == {operator})
    product = next(products, None)
    if product is not None:
        odd |= spoilt(product)
    if product is not None and operators_of(product) == {PRODUCT}:
        longer = [one.model_copy(update={"call": one_row_more(one.call)}) for one in product.replacements]
        odd[USELESS] = product.only(longer)
    for plan in examples:
        if any(one.definition.startswith("gqa_table_decode_") for one in plan.replacements):
            odd |= spoilt(plan)
    return odd


def operators_of(plan: Plan) -> set[str]:
    return {one.call.operator for one in plan.replacements}


def spoilt(right: Plan) -> dict[str, Plan]:
    """By its name, a plan with the first output of its one Solution wrong in one element of a thousand."""
    (solution,) = right.solutions.values()
    (source,) = solution.sources
    arguments = source.content[source.content.rindex("def run(") + len("def run(") :].partition(")")[0]
    first = arguments.split(", ")[-len(right.replacements[0].outputs)]
    wrong = source.content + WRONG.format(arguments=arguments, output=first)
    solution = solution.model_copy(update={"sources": [source.model_copy(update={"content": wrong})]})
    replacements = [one.model_copy(update={"solution": solution.sha256}) for one in right.replacements]
    changed = {"solutions": {solution.sha256: solution}, "replacements": replacements}
    return {f"{replacements[0].definition}_wrong": right.model_copy(update=changed)}


def one_row_more(product: Call) -> Call:
    """A call of A and C with one row more."""
    a, b, c = (argument.value for argument in product.args)
    longer = [replace(value, shape=(value.shape[0] + 1, *value.shape[1:])) for value in (a, c)]
    values = (longer[0], b, longer[1])
    changed = zip(product.args, values, strict=True)
    return product.model_copy(update={"args": [arg.model_copy(update={"value": value}) for arg, value in changed]})


def compared(output: Path, names: Sequence[str], engine: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `kcap ab` found of each plan: `compared`, and the `quality` of its logits."""
    file = output / "compared.json"
    plans = {str(output / f"{name}.plan.json"): name for name in names}
    if plans and not file.exists():
        words = [word for plan in plans for word in ("--plan", plan)]
        run("ab", *words, "--no-trial", *engine, *COMPARED, "-o", str(file), fails=True)
    if not file.exists():
        return {}
    applied = json.loads(file.read_bytes())
    return {
        plans[one["plan"]]: {**one, "quality": applied["quality"].get(one["plan"], {})}
        for one in applied["plans"]
        if one["plan"] in plans
    }


def in_fresh_engines(output: Path, engine: Sequence[str], pairs: int) -> dict[str, Any]:
    """What the chosen plan changes from one engine to the next."""
    file, plan = output / "fresh.json", output / f"{CHOSEN}.plan.json"
    if not file.exists():
        words = ["--plan", str(plan), "--no-trial", "--pairs", str(pairs)]
        run("ab", *words, *engine, *COMPARED, "-o", str(file), fails=True)
    found: dict[str, Any] = json.loads(file.read_bytes())["fresh"] if file.exists() else {}
    return found


def row_of(name: str, plan: Plan, found: dict[str, Any] | None) -> Row:
    """`found`: what was measured of the plan in the engine."""
    seams = ", ".join(sorted({one.seam for one in plan.replacements}))
    if not plan.replacements:
        left = next((left for left in plan.left_out if left.solution.endswith(name)), None)
        return Row(name, "none", failure=left.reason if left else "nothing is faster")
    decode = [one for one in (found or {}).get("compared", ()) if one["phase"] == "decode"]
    if found is None or not decode:
        return Row(name, seams, failure="not measured")
    most = max(decode, key=lambda one: one["steps"])
    us, difference = most["engine_us"], most["solutions"] or {}
    measured, half = (difference.get(of) and difference[of] / us for of in ("us", "half_interval_us"))
    return Row(name, seams, most["predicted_us"] / us, measured, half, most["held"], found["quality"].get("rms"))


if __name__ == "__main__":
    sys.exit(main())

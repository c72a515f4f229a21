"""What kcap makes of TVM's Relax VM on a GPU, with CUDA graphs: a table to report.

    python scripts/gpu/relax_vm.py (LIBRARY | --build) [--tiny] [--limit SECONDS] [--output DIR]

Runs the small Llama of tests/capture/tvm_llama.py, two layers of Llama-3.1-8B's widths in half precision, plain and
under `kcap record --check-coverage`: some profiled steps; then decodes of two sequences, whose graphs were captured
before, a mixed step, and decodes of three, whose graphs are captured while they count. Checked are the logits, bit for
bit; the counts, by what the architecture runs in each step, and of the graphs by their launches; the GPU time that is
of recorded calls (at least 97 %); how much replays (95 % of the counts), and how near its time is to the engine's; and
the exported Definitions, against the library's kernels. A stage that fails is a line of the table, and the next one is
tried.

LIBRARY comes from `tvm_llama.py build LIBRARY --cuda --llama-8b`, on a machine with nvcc and CUDA's runtime; `--build`
compiles it here, which needs all of apache-tvm. Exits with 1 if a line is BAD.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from counts import Check, end_with
from fidelity import run, said

import kcap
from kcap.capture.window.profiled import MOST_STEPS
from kcap.errors import DONE, FAILED, PARTIAL
from kcap.schemas.recording.recording import Recording

PROGRAM = Path(__file__).parents[2] / "tests" / "capture" / "tvm_llama.py"
LAYERS = 2
GRAPHS = LAYERS + 1  # of a decode step: attention runs between them
PROFILED = MOST_STEPS - 1  # the first steps of the run; the making of the cache is taken for one, and forgotten
DECODES, LATE = PROFILED + 9, 9  # of two sequences, and of all three
LEAST = {"coverage": 0.97, "replayed": 0.95}
WIDTHS = "--llama-8b"


class Runs:
    """The program and `kcap`, until time is up. `library`, and whether it has Llama-3.1-8B's widths."""

    def __init__(self, library: Path, output: Path, tiny: bool, until: float) -> None:
        self.library, self.output, self.until = library, output, until
        self.recording = output / "relax_vm.kcap"
        self.sizes = () if tiny else (WIDTHS,)

    def program(self, action: str, *words: str, record: tuple[str, ...] = ()) -> str:
        """What it said; a CalledProcessError or TimeoutExpired where it did not end well."""
        command = [*record, sys.executable, str(PROGRAM), action, str(self.library), "--cuda", *self.sizes, *words]
        print("$", *command, flush=True)
        left = max(self.until - time.monotonic(), 1)
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        print(done.stdout[-1500:], done.stderr[-1500:], f"status {done.returncode}", flush=True)
        done.check_returncode()
        return done.stdout

    def logits(self, *record: str) -> str:
        said = self.program("run", "--decodes", str(DECODES), "--late-decodes", str(LATE), record=record)
        return "\n".join(line for line in said.splitlines() if line.startswith(("outputs", "finite")))

    def outputs(self) -> Iterator[Check]:
        plain = self.logits()
        yield Check("logits are finite", plain.split("finite")[-1].strip(), "finite True" in plain)
        words = ("record", "--force", "--check-coverage", "-o", str(self.recording), "--")
        recorded = self.logits(sys.executable, "-m", "kcap", *words)
        alike = recorded == plain
        yield Check("logits recorded", "the same bits" if alike else f"{recorded} and plain {plain}", alike)

    def counts(self) -> Iterator[Check]:
        yield from of_recording(kcap.load(self.recording), DECODES, LATE, PROFILED)

    def coverage(self) -> Iterator[Check]:
        known = kcap.load(self.recording).metadata.coverage or {}
        share = known.get("share")
        if share is None or share < LEAST["coverage"]:
            print(json.dumps(known)[:3000], flush=True)
        found = "no step was profiled" if share is None else f"{share:.2%} of the GPU time"
        yield Check("coverage", found, share is not None and share >= LEAST["coverage"])

    def replay(self) -> Iterator[Check]:
        done = run("replay", str(self.recording), "--json", "--seconds", "0.02", until=self.until)
        found = parsed(done, FAILED)
        for part in ("skipped", "failed"):
            for reason in found[part]["reasons"]:
                print(f"{part}: {json.dumps(reason)[:400]}", flush=True)
        share = found["replayed"]["share"]
        yield Check("replayed", f"{share:.1%} of the counts", share >= LEAST["replayed"])

    def fidelity(self) -> Iterator[Check]:
        found = parsed(run("replay", str(self.recording), "--compare-engine", "--json", until=self.until))
        (self.output / "relax_vm.fidelity.json").write_text(json.dumps(found))
        for kind in found["kinds"]:
            name = " ".join(str(kind[part]) for part in ("phase", "sequences", "tokens", "mode") if part in kind)
            print(f"fidelity of {name}", *kind["outside"], sep="\n  ", flush=True)
            yield Check(f"fidelity, {name}", said(kind), not kind["outside"])
        if not found["kinds"]:
            yield Check("fidelity", "no step was compared", False)

    def export(self) -> Iterator[Check]:
        dataset = self.output / "relax_vm.dataset"
        words = ("--to", "flashinfer-bench", "-o", str(dataset), "--force", "--allow-truncated")
        done = run("export", str(self.recording), *words, until=self.until)
        if done.returncode not in (DONE, PARTIAL):
            raise RuntimeError(f"status {done.returncode}")
        lines = [json.loads(line) for line in (dataset / "checks.jsonl").read_text().splitlines()]
        status = Counter(line["status"] for line in lines)
        for line in lines:
            if line["status"] != "agrees":
                print(f"{line['status']}: {line['definition']}: {str(line.get('reason'))[:300]}", flush=True)
        found = ", ".join(f"{number} {word}" for word, number in status.items())
        yield Check("Definitions", f"{found}, of {len(lines)}", status["agrees"] == len(lines) > 0)


def parsed(done: subprocess.CompletedProcess[str], *also: int) -> dict[str, Any]:
    """The JSON that kcap printed; RuntimeError where its status is another than done, partial and `also`."""
    if done.returncode not in (DONE, PARTIAL, *also):
        raise RuntimeError(f"status {done.returncode}: {done.stdout[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def of_recording(recording: Recording, decodes: int, late: int, profiled: int) -> Iterator[Check]:
    """What the Recording of a run must hold. Its first `profiled` steps, a prefill among them, do not count."""
    metadata = recording.metadata
    broken = [tap for tap in metadata.taps if tap.status in ("failed", "off")]
    taps = [f"{tap.name} {tap.status}: {tap.detail}" for tap in broken]
    lacking = "; ".join([*taps, *metadata.notes]) or str(metadata.complete)
    yield Check("the Recording is complete", lacking, metadata.complete and not taps)
    early = decodes - max(profiled - 1, 0)
    wanted = {"prefill": int(profiled == 0), "decode": early + late, "mixed": 1}
    steps = {phase: metadata.steps.get(phase, 0) for phase in wanted}
    yield Check("steps", ", ".join(f"{number} {phase}" for phase, number in steps.items()), steps == wanted)
    graphs = [program for program in recording.programs if program.kind == "graph"]
    launches = sorted(sum(count.count for count in graph.counts) for graph in graphs)
    expected = sorted([early - int(profiled == 0), late - 1] * GRAPHS)  # one decode of each kind captured them
    yield Check("launches of graphs", f"{launches}, by the steps {expected}", launches == expected)
    ran, in_graphs = Counter[str](), Counter[str]()
    for call in recording.kernels():
        kind = purpose(call.operator)
        ran[kind] += call.counted("decode")
        in_graphs[kind] += sum(count.count for count in call.counts if (count.phase, count.mode) == ("decode", "graph"))
    a_step = {"products": 4 * LAYERS + 1, "norms": 2 * LAYERS + 1, "attentions": LAYERS, "cache updates": LAYERS}
    for kind, each in a_step.items():
        number = each * (early + late)
        found = f"{ran[kind]} = {each} x {early + late}, {in_graphs[kind]} of them in graphs"
        yield Check(f"{kind} of decode steps", found, ran[kind] == number)
    captured = {"products": 4 * LAYERS - 1, "norms": 2 * LAYERS}  # others read the embeddings, or write the logits
    for kind, each in captured.items():
        number = each * (sum(launches) // GRAPHS)
        yield Check(f"{kind} in graphs", f"{in_graphs[kind]}, by launches {number}", in_graphs[kind] == number > 0)


def purpose(operator: str) -> str:
    """`tvm::fused_NT_matmul1_add.0a1b2c3d` -> `products`."""
    name = re.sub(r"\d+", "", operator.removeprefix("tvm::").partition(".")[0])
    kinds = {"matmul": "products", "rms_norm": "norms", "attention_decode": "attentions", "append": "cache updates"}
    return next((kind for part, kind in kinds.items() if part in name), "others")


def cuda_libraries() -> str:
    """Where CUDA's runtime is, for a TVM that is imported before torch: beside torch's, else the toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    libraries = [path.parent for folder in folders for path in folder.glob("*/lib/libcudart.so.*")]
    return str(next(iter(libraries), "/usr/local/cuda/lib64"))


def stage(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Its lines, and one more where it failed."""
    began = time.monotonic()
    try:
        yield from checks()
    except Exception as error:  # the others go on
        yield Check(name, f"{type(error).__name__}: {error}"[:300], False)
    print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--build", action="store_true", help="compile the library first")
    parser.add_argument("--tiny", action="store_true", help="of 64 hidden units, to try this script")
    parser.add_argument("--limit", type=float, default=150, help="seconds  [default: 150]")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    args = parser.parse_args()
    if args.build == (args.library is not None):
        parser.error("name a LIBRARY, or pass --build")
    args.output.mkdir(parents=True, exist_ok=True)
    library = (args.library or args.output / "llama.so").resolve()
    folders = (os.environ.get("LD_LIBRARY_PATH"), cuda_libraries())
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    runs = Runs(library, args.output, args.tiny, time.monotonic() + args.limit)
    if args.build:
        runs.program("build")
    stages = (runs.outputs, runs.counts, runs.coverage, runs.replay, runs.fidelity, runs.export)
    rows = [row for checks in stages for row in stage(checks.__name__, checks)]
    end_with(rows, separator=": ")


if __name__ == "__main__":
    main()

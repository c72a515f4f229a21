"""Does replay add up to the engine's own GPU time? Records Llama-3.1-8B in vLLM and holds the replay against that.

    python scripts/gpu/fidelity.py [--mode eager|compiled]… [--batch N]… [--quick] [--limit SECONDS] [--output DIR]

For each mode one engine records the model's configuration with dummy weights and --check-coverage, the batches (1, 16
and 128 sequences; the one of batch 1 has a prompt of 4,096 tokens) one after another, to DIR/fidelity-MODE.kcap, and
`kcap replay --compare-engine` is run on that, which writes DIR/MODE.fidelity (fidelity.png if matplotlib is installed,
else fidelity.json alone). A whole Recording of this depth that is there already, and profiled these steps, is used
again. Prints a short table last: the prefill of 4,096 tokens and the decode steps of each batch. When the limit is
over, what is left is told and not tried. Needs an NVIDIA GPU and vLLM; exits with 1 if one is outside the bounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counts import Check, end_with

import kcap
from kcap.capture.window.profiled import TOKENS
from kcap.errors import DONE, PARTIAL, KcapError
from kcap.schemas.results import coverage

MODEL = "meta-llama/Llama-3.1-8B"
MODES = {"eager": ("--eager",), "compiled": ()}
PROMPTS = {1: 4096, 16: 256, 128: 128}  # tokens of each prompt, by the number of prompts
OUTPUT = 2 * TOKENS  # tokens of each answer: the counted steps stay near the profiled ones' lengths
QUICK = 4  # layers


def run(*words: str, until: float) -> subprocess.CompletedProcess[str]:
    """`kcap` with its messages shown; its standard output is kept. Status 124 where time was up."""
    print("$ kcap", *words, flush=True)
    command = [sys.executable, "-m", "kcap", *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "")
    print(f"status {done.returncode}, {until - time.monotonic():.0f} s left", flush=True)
    return done


def wanted(batch: int) -> dict[str, dict[str, Any]]:
    """The kinds of steps asked for."""
    steps = {f"decode of {batch}": {"phase": "decode", "sequences": batch, "tokens": batch}}
    if PROMPTS[batch] == 4096:
        steps["prefill of 4,096"] = {"phase": "prefill", "sequences": batch, "tokens": 4096}
    return steps


def there(recording: Path, batches: Sequence[int], layers: int | None) -> bool:
    """Whether it is a whole Recording of `layers` (None: all) in which each step asked for was profiled."""
    try:
        known = kcap.load(recording).metadata
        profiled = [vars(step).items() for step in coverage.read(recording / coverage.FILE)]
    except KcapError:
        return False
    asked = [fields.items() for batch in batches for fields in wanted(batch).values()]
    deep = known.layers_recorded == (layers or known.layers_model)
    return deep and known.complete and all(any(fields <= step for step in profiled) for fields in asked)


def record(mode: str, batches: Sequence[int], output: Path, layers: int | None, until: float) -> Check:
    if there(output, batches, layers):
        return Check(f"record {output.stem}", "there already", True)
    depth = ("--num-layers", str(layers)) if layers else ()
    counts, lengths = (",".join(map(str, numbers)) for numbers in (batches, (PROMPTS[batch] for batch in batches)))
    load = ("--num-prompts", counts, "--input-len", lengths, "--output-len", str(OUTPUT))
    what = ("--model", MODEL, "--framework", "vLLM", "--load-format", "dummy", "--check-coverage")
    done = run("record", *what, *load, *MODES[mode], *depth, "-o", str(output), "--force", until=until)
    return Check(f"record {output.stem}", f"status {done.returncode}", done.returncode == 0)


def replay(recording: Path, folder: Path, until: float) -> dict[str, Any] | None:
    """What `kcap replay --compare-engine` found, also where it is outside the bounds; None where it failed."""
    drawn = ("-o", str(folder), "--force") if importlib.util.find_spec("matplotlib") else ()
    done = run("replay", str(recording), "--compare-engine", "--json", *drawn, until=until)
    if done.returncode not in (DONE, PARTIAL):
        print(done.stdout, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    folder.mkdir(exist_ok=True)
    (folder / "fidelity.json").write_text(done.stdout)
    return found


def checks(name: str, batch: int, found: dict[str, Any]) -> Iterator[Check]:
    """A line for each kind of step that is asked for; BAD where there is none."""
    for what, fields in wanted(batch).items():
        kinds = [kind for kind in found["kinds"] if fields.items() <= kind.items()]
        if not kinds:
            yield Check(f"{name}, {what}", "no such step was profiled", False)
        for kind in kinds:
            print(f"{name}: {what}", *kind["outside"], sep="\n  ", flush=True)
            yield Check(f"{name}, {what}, {kind['mode']} steps", said(kind), not kind["outside"])


def said(kind: dict[str, Any]) -> str:
    """`5.012 ms; serving 98.7% (1.3% off); Program 99.5% (0.5% off); span 5.230 ms at 103.1%`."""
    states = kind["states"]
    parts = [f"{states['serving']['engine_us'] / 1e3:.3f} ms"]
    for name, state in states.items():
        ratio = state["replayed_us"] / state["engine_us"] if state["engine_us"] else 0.0
        parts.append(f"{name} {ratio:.1%} ({state['error']:.1%} off)")
    span, ratio = kind["span"], kind["program"]["over_span"]
    parts.append("no span" if span is None else f"span {span['own_us'] / 1e3:.3f} ms at {ratio or 0.0:.1%}")
    return "; ".join(parts)


def part(mode: str, batches: Sequence[int], output: Path, layers: int | None, until: float) -> Iterator[Check]:
    if time.monotonic() > until:
        yield Check(mode, "not tried: the limit was over", False)
        return
    recording = output / f"fidelity-{mode}.kcap"
    recorded = record(mode, batches, recording, layers, until)
    if not recorded.passed:
        yield recorded
        return
    found = replay(recording, output / f"{mode}.fidelity", until)
    if found is None:
        yield Check(f"replay {recording.stem}", "failed", False)
        return
    for batch in batches:
        yield from checks(f"{mode}-{batch}", batch, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--batch", action="append", type=int, choices=PROMPTS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} layers")
    parser.add_argument("--limit", type=float, default=3600, help="seconds  [default: 3600]")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine admits a load whole, not as it arrives
    until = time.monotonic() + args.limit
    layers = QUICK if args.quick else None
    batches = sorted({*(args.batch or PROMPTS)})
    rows = [row for mode in args.mode or MODES for row in part(mode, batches, args.output, layers, until)]
    end_with(rows, separator=": ")


if __name__ == "__main__":
    main()

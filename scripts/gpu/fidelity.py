"""Does replay add up to the engine's own GPU time? Records Llama-3.1-8B in vLLM and holds the replay against that.

    python scripts/gpu/fidelity.py [--mode eager|compiled]… [--batch N]… [--quick] [--output DIR]

For each mode and batch (1, 16 and 128 sequences; the one of batch 1 has a prompt of 4,096 tokens) a Recording of the
model's configuration with dummy weights is made with --check-coverage, and `kcap replay --fidelity` is run on it. Its
figure is DIR/NAME.fidelity/fidelity.png. Prints a short table last: the prefill of 4,096 tokens and the decode steps of
each batch. Needs an NVIDIA GPU and vLLM; exits with 1 if one of them is outside the bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counts import Check

MODEL = "meta-llama/Llama-3.1-8B"
MODES = {"eager": ("--eager",), "compiled": ()}
PROMPTS = {1: 4096, 16: 256, 128: 128}  # tokens of each prompt, by the number of prompts
OUTPUT = 16  # tokens of each answer: the counted steps stay near the lengths of the profiled ones, which have 8


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """`kcap` with its messages shown; its standard output is kept."""
    print("$ kcap", *words, flush=True)
    return subprocess.run([sys.executable, "-m", "kcap", *words], stdout=subprocess.PIPE, text=True)


def record(mode: str, batch: int, output: Path, *more: str) -> Check:
    load = ("--num-prompts", str(batch), "--input-len", str(PROMPTS[batch]), "--output-len", str(OUTPUT))
    what = ("--model", MODEL, "--framework", "vLLM", "--load-format", "dummy", "--check-coverage")
    done = run("record", *what, *load, *MODES[mode], *more, "-o", str(output), "--force")
    return Check(f"record {output.stem}", f"status {done.returncode}", done.returncode == 0)


def replay(recording: Path, folder: Path) -> dict[str, Any] | None:
    """What `kcap replay --fidelity` found, also where it is outside the bounds; None where it failed."""
    done = run("replay", str(recording), "--fidelity", "-o", str(folder), "--json", "--force")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        print(done.stdout, f"status {done.returncode}", flush=True)
        return None
    return found


def checks(name: str, batch: int, found: dict[str, Any]) -> Iterator[Check]:
    """A line for each kind of step that is asked for; BAD where there is none."""
    wanted = {f"decode of {batch}": {"phase": "decode", "sequences": batch, "tokens": batch}}
    if PROMPTS[batch] == 4096:
        wanted["prefill of 4,096"] = {"phase": "prefill", "tokens": 4096}
    for what, fields in wanted.items():
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


def part(mode: str, batch: int, output: Path, *more: str) -> Iterator[Check]:
    name = f"{mode}-{batch}"
    recording = output / f"fidelity-{name}.kcap"
    recorded = record(mode, batch, recording, *more)
    if not recorded.passed:
        yield recorded
        return
    found = replay(recording, output / f"{name}.fidelity")
    if found is None:
        yield Check(f"replay {recording.stem}", "failed", False)
        return
    yield from checks(name, batch, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--batch", action="append", type=int, choices=PROMPTS)
    parser.add_argument("--quick", action="store_true", help="4 layers")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    depth = ("--num-layers", "4") if args.quick else ()
    pairs = [(mode, batch) for mode in args.mode or MODES for batch in args.batch or PROMPTS]
    rows = [row for mode, batch in pairs for row in part(mode, batch, args.output, *depth)]
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{'ok ' if row.passed else 'BAD'}  {row.what:<{width}}: {row.found}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()

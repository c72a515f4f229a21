"""What recording costs a serving engine: vLLM's throughput with and without it, in one run, in interleaved pairs.

    python scripts/gpu/overhead.py --model meta-llama/Llama-3.1-8B [--pairs 5] [--seconds 5] [--num-layers N]

One engine with kcap in it serves the same batch again and again; between two runs the window is paused or opened. A
pair is one run without and one with recording, in alternating order; before each pair stands another run without, whose
ratio to the pair's own is the A/A spread. Prints both medians, and the samples as JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kcap.capture.config import SESSION_VARIABLE, Session
from kcap.capture.frameworks import find_model, vllm_arguments
from kcap.capture.launch import DEFAULTS
from kcap.capture.window import POLL


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="the least length of a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="the engine's defaults instead of eager")
    parser.add_argument("--json", type=Path, help="write every sample here")
    return parser.parse_args()


class Bench:
    """An engine whose recording can be switched between runs of equal work."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        from vllm import LLM

        target = find_model(args.model, "dummy")
        self.session = session
        self.prompts = [[(7 * i + j) % 1000 + 3 for j in range(args.input_len)] for i in range(args.prompts)]
        engine = vllm_arguments(target, "dummy", args.num_layers, not args.compiled, {}, 8192)
        self.llm = LLM(**engine, enable_prefix_caching=False)

    def run(self, tokens: int) -> float:
        """Seconds to generate `tokens` tokens for every prompt."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def recording(self, on: bool) -> None:
        if on:
            self.session.pause_file.unlink(missing_ok=True)
        else:
            self.session.pause_file.touch()
        time.sleep(3 * POLL)


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, float]]:
    bench.recording(False)
    bench.run(64)
    tokens = max(64, int(128 * args.seconds / bench.run(128) * 1.1))
    pairs = []
    for number in range(args.pairs):
        bench.recording(False)
        pair = {"tokens": float(tokens), "control": bench.run(tokens)}
        for on in (number % 2 == 0, number % 2 == 1):
            bench.recording(on)
            pair["on" if on else "off"] = bench.run(tokens)
        pairs.append(pair)
        print(f"pair {number + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in pair.items()), flush=True)
    return pairs


def main() -> None:
    import os

    args = options()
    with tempfile.TemporaryDirectory() as directory:
        session = Session(directory, framework="vLLM", model=args.model)
        session.write()
        os.environ |= {**DEFAULTS["vLLM"], SESSION_VARIABLE: str(session.file)}
        pairs = measure(Bench(args, session), args)
    loss = [1 - pair["off"] / pair["on"] for pair in pairs]
    spread = [abs(1 - pair["off"] / pair["control"]) for pair in pairs]
    mode = "compiled" if args.compiled else "eager"
    print(f"throughput loss, {args.model}, {mode}, {len(pairs)} pairs of at least {args.seconds:g} s: "
          f"median {statistics.median(loss):.2%}, from {min(loss):.2%} to {max(loss):.2%}; "
          f"A/A median {statistics.median(spread):.2%}, at most {max(spread):.2%}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"pairs": pairs, "loss": loss, "spread": spread}))


if __name__ == "__main__":
    main()

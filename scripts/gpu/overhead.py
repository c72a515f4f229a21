"""What recording costs a serving engine: vLLM's throughput with and without it, in one run, in interleaved pairs.

    python scripts/gpu/overhead.py --model meta-llama/Llama-3.1-8B --batch 16 --batch 256 [--pairs 5] [--seconds 5]
        [--engine-arg KEY=VALUE]…

One engine with kcap in it serves the same batch again and again; between two runs the window is paused or opened. Its
scheduler is in this process, so that all prompts of a run are there at its first step: else the runs would differ in
how many steps read them. A pair is one run without and one with recording, in alternating order; before each pair
stands another run without, whose ratio to the pair's own is the A/A spread. Prints both medians for each batch size,
and the samples with --json. A small batch in eager mode is bound by the host, where recording costs its time; a large
one by the GPU. Exits with 1 where a run with recording recorded less than its steps, or one without it any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kcap.capture.controller.frameworks import find_model
from kcap.capture.controller.offline import engine_arguments
from kcap.capture.engines import Start
from kcap.capture.engines.vllm import adapter
from kcap.capture.session import SESSION_VARIABLE, Session
from kcap.capture.shards.counts import steps_so_far
from kcap.capture.window.window import WATCH_POLL


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", type=int, action="append", help="sequences served at once; 16 and 256 without it")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="the least length of a run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--compiled", action="store_true", help="the engine's defaults instead of eager")
    parser.add_argument("--json", type=Path, help="write every sample here")
    return parser.parse_args()


class Bench:
    """An engine whose recording can be switched between runs of equal work."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        from vllm import LLM

        target = find_model(args.model, "dummy")
        self.session = session
        self.input_len = args.input_len
        given = engine_arguments(tuple(args.engine_arg))
        engine = adapter.arguments(Start(target, "dummy", args.num_layers, not args.compiled, given, 8192))
        self.llm = LLM(**engine, enable_prefix_caching=False)

    def run(self, batch: int, tokens: int) -> float:
        """Seconds to serve `batch` prompts, `tokens` generated tokens each."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        ids = [[(7 * i + j) % 1000 + 3 for j in range(self.input_len)] for i in range(batch)]
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in ids]
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def recorded(self) -> int:
        """Steps so far."""
        return steps_so_far(Path(self.session.directory))[1]

    def recording(self, on: bool) -> None:
        if on:
            self.session.pause_file.unlink(missing_ok=True)
        else:
            self.session.pause_file.touch()
        time.sleep(3 * WATCH_POLL)


def measure(bench: Bench, batch: int, args: argparse.Namespace) -> list[dict[str, float]]:
    bench.recording(False)
    bench.run(batch, 32)
    tokens = max(64, int(64 * args.seconds / bench.run(batch, 64) * 1.2))
    pairs = []
    for number in range(args.pairs):
        bench.recording(False)
        pair = {"tokens": float(tokens), "control": bench.run(batch, tokens)}
        for on in (number % 2 == 0, number % 2 == 1):
            bench.recording(on)
            before, kind = bench.recorded(), "on" if on else "off"
            pair[kind] = bench.run(batch, tokens)
            pair[f"steps {kind}"] = float(bench.recorded() - before)
        pairs.append(pair)
        print(f"batch {batch}, pair {number + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in pair.items()), flush=True)
    return pairs


def report(pairs: list[dict[str, float]], batch: int, args: argparse.Namespace) -> None:
    loss = [1 - pair["off"] / pair["on"] for pair in pairs]
    spread = [abs(1 - pair["off"] / pair["control"]) for pair in pairs]
    mode = "compiled" if args.compiled else "eager"
    print(
        f"throughput loss, {args.model}, {mode}, batch {batch}, {len(pairs)} pairs of runs of "
        f"{min(pair['off'] for pair in pairs):.1f} s: median {statistics.median(loss):.1%}, from {min(loss):.1%} to "
        f"{max(loss):.1%}; A/A median {statistics.median(spread):.1%}, at most {max(spread):.1%}",
        flush=True,
    )


def held(pairs: list[dict[str, float]]) -> bool:
    """Whether a run with recording recorded a step for each token at least, and one without it none."""
    return all(pair["steps on"] >= pair["tokens"] and not pair["steps off"] for pair in pairs)


def main() -> None:
    import os

    args = options()
    with tempfile.TemporaryDirectory() as directory:
        session = Session(directory, framework="vLLM", model=args.model)
        session.write()
        os.environ |= {**adapter.FRAMEWORK.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        os.environ[SESSION_VARIABLE] = str(session.file)
        bench = Bench(args, session)
        results = {batch: measure(bench, batch, args) for batch in args.batch or (16, 256)}
        bench.llm.llm_engine.engine_core.shutdown()  # while its ranks' folder is there
    for batch, pairs in results.items():
        report(pairs, batch, args)
    if args.json:
        args.json.write_text(json.dumps(results))
    if not all(map(held, results.values())):
        sys.exit("it was not so that the runs with recording recorded all of their steps, and the others none")


if __name__ == "__main__":
    main()

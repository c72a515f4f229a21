"""What recording costs a step, on a machine too noisy for whole runs: recorded and unrecorded steps take turns.

    python scripts/gpu/overhead_by_step.py [--model meta-llama/Llama-3.1-8B] [--batch 16] [--steps 1500] [--compiled]
                                           [--mixed] [--engine-arg KEY=VALUE]…

One vLLM engine in this process decodes one batch; before each step a draw decides whether it is recorded, not recorded,
or not recorded again (the control). Prints the median step of each, their ratios, and the throughput loss. Eager decode
of a small batch is bound by the host: that is where recording costs most. `--compiled`: the engine's own defaults.
`--mixed`: requests of many lengths come and go, and the steps in which one's prompt is read are a row of their own.

Of an engine with N ranks each rank draws the same and says its own:

    torchrun --nproc-per-node N scripts/gpu/overhead_by_step.py --engine-arg tensor_parallel_size=N \\
        --engine-arg distributed_executor_backend=external_launcher

Exits with 1 where not as many steps were recorded as were to be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kcap.capture.controller.frameworks import find_model
from kcap.capture.controller.offline import engine_arguments
from kcap.capture.engines import Start
from kcap.capture.engines.vllm import adapter
from kcap.capture.session import Session
from kcap.capture.shards.counts import steps_so_far
from kcap.capture.window.window import Window

KINDS = ("off", "control", "on")
OTHERS = 16  # steps: the last one is not timed, and the engine's own first ones may come before the turns


class Turns:
    """Draws before each step what it is to be, and times it to the start of the next."""

    def __init__(self, window: Window, batch: int, mixed: bool) -> None:
        self.window, self.batch, self.mixed = window, batch, mixed
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)  # by phase and kind
        self._draw = random.Random(0)
        self._phase = self._kind = ""
        self._start = 0.0

    def before(self, scheduled: Any) -> None:
        if self._kind:
            self.times[self._phase, self._kind].append(time.perf_counter() - self._start)
        tokens, sequences = scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens)
        self._phase = "decode" if tokens == sequences else "mixed"
        self._kind = self._draw.choice(KINDS) if tokens == self.batch or (tokens and self.mixed) else ""
        if self.window.open != (self._kind == "on"):
            self.window._set_paused(self.window.open)
        self._start = time.perf_counter()

    def install(self) -> None:
        """Into each of vLLM's runners: which one serves, it decides later."""
        for module in adapter.RUNNERS:
            with contextlib.suppress(ImportError):  # the V2 runner's, without Triton
                self._install(importlib.import_module(module).GPUModelRunner)

    def _install(self, runner: Any) -> None:
        original = runner.execute_model

        def execute_model(this: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if self.window.following and not kwargs.get("dummy_run"):
                self.before(scheduled)
            return original(this, scheduled, *args, **kwargs)

        runner.execute_model = execute_model


def serve(args: argparse.Namespace, window: Window) -> Turns:
    from vllm import LLM, SamplingParams

    target = find_model(args.model, "dummy")
    start = Start(target, "dummy", None, not args.compiled, engine_arguments(tuple(args.engine_arg)), 8192)
    llm = LLM(**adapter.arguments(start), enable_prefix_caching=False, max_num_seqs=args.batch)
    turns = Turns(window, args.batch, args.mixed)
    turns.install()
    if args.mixed:
        come_and_go(llm, args)
        return turns
    ids = [[(7 * i + j) % 250 + 3 for j in range(256)] for i in range(args.batch)]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in ids]
    for _ in range(3):
        params = SamplingParams(max_tokens=args.steps // 3, temperature=0.0, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)
    return turns


def come_and_go(llm: Any, args: argparse.Namespace) -> None:
    """Serve `--steps` steps about, requests of 16 to 512 tokens with answers of 16 to 128."""
    from vllm import SamplingParams

    draw = random.Random(1)
    prompts, params = [], []
    for _ in range(args.steps * args.batch // 72):
        ids = [draw.randrange(3, 100) for _ in range(draw.randint(16, 512))]
        prompts.append({"prompt_token_ids": ids})
        tokens = draw.randint(16, 128)
        params.append(SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False))
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--compiled", action="store_true", help="the engine's defaults instead of eager")
    parser.add_argument("--mixed", action="store_true", help="requests of many lengths that come and go")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    os.environ |= {**adapter.FRAMEWORK.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory() as directory:
        session = Session(directory, framework="vLLM")
        session.write()
        window = Window(session)
        window.register()
        adapter.hook(window)
        turns = serve(args, window)
        window.close()
        _, recorded = steps_so_far(Path(directory))
    mode = "compiled" if args.compiled else "eager"
    if rank := os.environ.get("RANK"):
        mode += f", rank {rank}"
    for phase in dict.fromkeys(phase for phase, _ in turns.times):
        median = {kind: statistics.median(turns.times[phase, kind]) * 1e3 for kind in KINDS}
        for kind in KINDS:
            print(f"{phase} {kind:8} {len(turns.times[phase, kind]):5} steps, median {median[kind]:.3f} ms")
        print(
            f"throughput loss by step, {args.model}, {mode}, {phase} of {args.batch}:"
            f" {1 - median['off'] / median['on']:.1%}; A/A {abs(1 - median['off'] / median['control']):.1%}"
        )
    print(f"{recorded} steps recorded")
    drawn = sum(len(times) for (_, kind), times in turns.times.items() if kind == "on")
    if not drawn:
        sys.exit("no step was timed")
    if not drawn <= recorded <= drawn + OTHERS:
        sys.exit(f"{drawn} steps were to be recorded, not {recorded}")


if __name__ == "__main__":
    main()

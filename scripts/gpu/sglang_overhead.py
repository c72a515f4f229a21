"""What recording costs a decode step of SGLang: recorded and unrecorded steps take turns in one scheduler.

    python scripts/gpu/sglang_overhead.py [--model meta-llama/Llama-3.1-8B] [--backend triton] [--batch 16] [--steps N]
                                          [--ranks N]

A draw decides for each run of steps whether it is recorded, not recorded, or not recorded again (the control); ranks of
tensor parallelism draw alike, and the first one's steps are timed, which end when all have. SGLang schedules a step
while the last one runs, so the first steps of a run are left out. A step that is not recorded does not come to kcap at
all. Prints the median step of each and the throughput loss; exits with 1 where that is over --most. Needs the
interpreter of an environment with SGLang and kcap; runs on a CPU, too (`--model kcap/tiny-llama`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from marks import mark

from kcap.capture.controller.frameworks import find_model
from kcap.capture.engines import Start
from kcap.capture.engines.sglang import adapter
from kcap.capture.engines.sglang.offline import of_this_machine
from kcap.capture.session import Session, Workload
from kcap.capture.shards.counts import steps_so_far
from kcap.capture.window.window import Window

KINDS = ("off", "control", "on")
RUN, LEFT_OUT = 12, 4  # steps of one kind, and how many of them are not looked at
SETTINGS = "KCAP_TURNS"
PROMPT = 256  # tokens


class Turns:
    """Draws what the next run of decode steps is to be; times each step from its start to the start of the next."""

    def __init__(self, window: Window, batch: int, output: Path) -> None:
        self._window, self._batch, self._output = window, batch, output
        self._times: dict[str, list[float]] = defaultdict(list)
        self._draw = random.Random(0)
        self._kind, self._place, self._start = "", 0, 0.0

    def before(self, batch: Any) -> None:
        """A batch is about to run."""
        now = time.perf_counter()
        if self._kind and self._place > LEFT_OUT:
            self._times[self._kind].append(now - self._start)
        if not (batch.forward_mode.is_decode() and len(batch.reqs) == self._batch):
            self._turn("")
        elif not self._kind or self._place >= RUN:
            self._output.write_text(json.dumps(self._times))
            self._turn(self._draw.choice(KINDS))
        self._place += 1
        self._start = time.perf_counter()

    def _turn(self, kind: str) -> None:
        if kind != self._kind:
            self._window._set_paused(kind != "on")
            self._window._started = kind == "on"  # else nothing of a step comes to kcap
        self._kind, self._place = kind, 0

    def install(self, scheduler: Any) -> None:
        original = scheduler.run_batch

        def run_batch(this: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.before(batch)
            return original(this, batch, *args, **kwargs)

        scheduler.run_batch = run_batch


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What SGLang starts as its scheduler's process."""
    settings = json.loads(os.environ[SETTINGS])
    session = Session(settings["directory"], framework="SGLang")
    window = Window(session)
    window.register()
    adapter.hook(window)
    from sglang.srt.managers import scheduler

    rank = inspect.signature(scheduler.run_scheduler_process).bind(*args, **kwargs).arguments["tp_rank"]
    Turns(window, settings["batch"], Path(settings["output"]).with_suffix(f".{rank}")).install(scheduler.Scheduler)
    return scheduler.run_scheduler_process(*args, **kwargs)


def serve(args: argparse.Namespace) -> str:
    """Have one engine decode a batch, three times over; the backend of its attention."""
    from sglang.srt.entrypoints.engine import Engine

    class Measured(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    tokens = args.steps // 3
    prompts = [[(7 * i + j) % 1000 + 3 for j in range(PROMPT)] for i in range(args.batch)]
    given: dict[str, Any] = {"disable_radix_cache": True, "sampling_backend": "pytorch", "mem_fraction_static": 0.6}
    machine = of_this_machine(Workload(args.batch, PROMPT, tokens))
    given = {"attention_backend": args.backend, "tp_size": args.ranks} | given | machine
    start = Start(find_model(args.model, "dummy"), "dummy", None, False, given, PROMPT + tokens)
    engine = Measured(**adapter.arguments(start))
    for _ in range(3):
        engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )
    engine.shutdown()
    return str(given["attention_backend"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--backend", default="triton", help="of attention, on a GPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism  [default: 1]")
    parser.add_argument("--most", type=float, default=1.0, help="per cent of throughput that may be lost  [default: 1]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shards, output = Path(directory) / "shards", Path(directory) / "times"
        Session(str(shards), framework="SGLang").write()
        os.environ[SETTINGS] = json.dumps({"directory": str(shards), "batch": args.batch, "output": str(output)})
        backend = serve(args)
        times = json.loads(output.with_suffix(".0").read_text())
        _, recorded = steps_so_far(shards)
    medians = {kind: statistics.median(times[kind]) * 1e3 for kind in KINDS}
    for kind, median in medians.items():
        print(f"{kind:8} {len(times[kind]):5} steps, median {median:.3f} ms")
    loss, control = (100 * (1 - medians["off"] / medians[kind]) for kind in ("on", "control"))
    passed = recorded >= len(times["on"]) > 0 and loss <= args.most
    what = f"throughput lost, {args.ranks} ranks, {backend}, batch {args.batch}"
    print(f"{mark(passed)}  {what}: {loss:.2f} %, A/A {control:.2f} %; {recorded} steps recorded")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

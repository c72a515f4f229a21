"""Whether recording changes what an engine generates, or makes it compile again.

    python scripts/gpu/outputs.py [--model meta-llama/Llama-3.1-8B] [--mode eager --mode piecewise --mode full]

In each mode three vLLM processes serve the same prompts, all submitted before the first step: unrecorded (the first one
fills the compiler's caches), unrecorded again (the control: batches and kernels may differ from run to run by
themselves), and recorded. Their tokens must be the same, and so must dynamo's counters of the last two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kcap.capture.controller.frameworks import find_model
from kcap.capture.engines import Start
from kcap.capture.engines.vllm import adapter
from kcap.capture.session import SESSION_VARIABLE, Session

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {},
}
COUNTED = ("stats", "frames", "inductor", "aot_autograd")  # dynamo's own counters


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Generate in this process; the tokens, and what was compiled."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams

    arguments = adapter.arguments(Start(find_model(args.model, "dummy"), "dummy", args.num_layers, False, {}, 2048))
    llm = LLM(**{**arguments, "enable_prefix_caching": False, **MODES[args.child]})
    ids = [[(7 * i + 13 * j) % 1000 + 3 for j in range(64 + 16 * i)] for i in range(16)]
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in ids]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": {name: dict(sorted(counters[name].items())) for name in COUNTED if name in counters},
    }


def child(args: argparse.Namespace, mode: str, session: Session | None) -> dict[str, Any]:
    env = {**os.environ, **adapter.FRAMEWORK.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env |= {SESSION_VARIABLE: str(session.file)} if session else {}
    with tempfile.NamedTemporaryFile() as file:
        words = ["--child", mode, "--model", args.model, "--tokens", str(args.tokens), "--output", file.name]
        words += ["--num-layers", str(args.num_layers)] if args.num_layers else []
        done = subprocess.run([sys.executable, __file__, *words], env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(f"{mode} did not run:\n{done.stderr[-3000:]}")
        answer: dict[str, Any] = json.loads(Path(file.name).read_text())
    return answer


def compare(args: argparse.Namespace, mode: str) -> bool:
    from kcap.capture.fold.recording import fold_session as merge

    plain, control = child(args, mode, None), child(args, mode, None)
    with tempfile.TemporaryDirectory() as directory:
        session = Session(f"{directory}/shards", framework="vLLM", model=args.model)
        session.write()
        recorded = child(args, mode, session)
        recording = merge(session, Path(directory) / "out")
    same, alike = (plain["tokens"] == other["tokens"] for other in (recorded, control))
    compiled = control["counters"] == recorded["counters"]
    steps = sum(recording.metadata.steps.values())
    tokens = sum(map(len, plain["tokens"]))
    print(
        f"{mode}: {tokens} tokens, recorded the same: {same} (control the same: {alike}); "
        f"dynamo's counters the same: {compiled}; {steps} steps recorded"
    )
    if not compiled:
        print(control["counters"], recorded["counters"], sep="\n")
    return same and compiled and steps > 0 and tokens > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.output.write_text(json.dumps(serve(args)))
        return
    same = [compare(args, mode) for mode in args.mode or MODES]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()

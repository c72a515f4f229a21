"""Whether a Recording is the same whatever the engine finds in its compile caches.

    python scripts/gpu/warm_starts.py [--framework vLLM] [--model meta-llama/Llama-3.1-8B] [--num-layers 4]
        [--serve] [--starts plain kcap kcap plain] [--server-arg …] [--engine-arg KEY=VALUE]…

Starts the engine again and again on the same prompts and on the same caches, which are empty at first: by default
without kcap, recorded twice, and without it again. Offline all prompts are submitted before the first step; with
`--serve` each start is a server, which answers one request after another. Each Recording is held against the first:
Calls, counts, kernels' sources and ATen fragments. The configuration that autotuning chose is none of these.
VLLM_USE_V2_MODEL_RUNNER=0 or 1 chooses vLLM's runner. Ends with a table; exits with 1 unless each is whole and equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from marks import mark
from servers import SERVERS, model_with_tokenizer, server

import kcap
from kcap.capture.controller import window_control
from kcap.capture.controller.frameworks import find_model
from kcap.capture.controller.offline import engine_arguments
from kcap.capture.controller.run import recorded_environment
from kcap.capture.engines import Engine, Start, of_framework
from kcap.capture.fold.recording import fold_session
from kcap.capture.session import Session
from kcap.schemas.diff import diff_calls
from kcap.schemas.recording.recording import Recording

PROMPTS = [[(7 * i + 13 * j) % 400 + 3 for j in range(64 + 16 * i)] for i in range(16)]
LIMIT_S = 300.0
# As much cache at each start, whatever memory compiling has left: the size of the cache is part of a Call.
SAME_CACHE = {"vllm": {"num_gpu_blocks_override": 4096}, "sglang": {"max_total_tokens": 65_536}}


def run(engine: Engine, arguments: dict[str, Any], recorded: bool, folder: Path) -> tuple[float, Recording | None]:
    """One start: its seconds, and what was recorded of it."""
    folder.mkdir()
    session = Session(str(folder / "shards"), framework=engine.FRAMEWORK.name, model="warm starts")
    session.write()
    workload = {"prompts": PROMPTS, "output_len": 16}
    job = {"session": str(session.file), "workload": workload, "engine_arguments": arguments}
    (folder / "job.json").write_text(json.dumps(job))
    plain = {**engine.FRAMEWORK.environment, **os.environ}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", str(engine.OFFLINE), str(folder / "job.json")],
        capture_output=True, text=True, timeout=LIMIT_S, env=recorded_environment(session) if recorded else plain,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"it did not run:\n{done.stderr[-3000:]}")
    return time.monotonic() - began, fold_session(session, folder / "out") if recorded else None


def serve(
    framework: str, arguments: list[str], model: Path, recorded: bool, folder: Path
) -> tuple[float, Recording | None]:
    """One start of a server, and its answers: its seconds, and what was recorded of the answers."""
    folder.mkdir()
    output = folder / "out"
    began = time.monotonic()
    with server(framework, model, arguments, output if recorded else None, folder / "server.log") as port:
        seconds = time.monotonic() - began
        if recorded:
            window_control.open_window(window_control.find_session(output))
        for prompt in PROMPTS:
            body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            headers = {"Content-Type": "application/json"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                answer.read()
        if recorded:
            window_control.close_window(window_control.find_session(output))
    return seconds, kcap.load(output) if recorded else None


def faults(found: Recording, first: Recording) -> list[str]:
    """What `found` lacks, or has other than the `first`."""
    taps = [f"{tap.name}: {tap.detail}" for tap in found.metadata.taps if tap.status not in ("ok", "absent")]
    diff = diff_calls(first.calls, found.calls)
    files = [{file.name for file in (each.path / "kernels").glob("*")} for each in (first, found)]
    other = [*(e.name for e in (*diff.only_a, *diff.only_b)), *(c.a.name for c in diff.changed)]
    return [
        *taps,
        *([f"{len(other)} calls differ: {', '.join(sorted(set(other))[:4])}"] if other else []),
        *([f"{len(files[0] ^ files[1])} sources or fragments differ"] if files[0] != files[1] else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="vLLM")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help="a server instead of an offline engine")
    parser.add_argument("--server-arg", action="append", default=[], help="one more of the server")
    parser.add_argument("--engine-arg", action="append", default=[], help="KEY=VALUE, one more of an offline engine")
    parser.add_argument("--starts", nargs="+", choices=("plain", "kcap"), default=["plain", "kcap", "kcap", "plain"])
    given = parser.parse_args()
    engine = of_framework(given.framework)
    if engine is None or engine.OFFLINE is None:
        parser.error(f"{given.framework} cannot be started offline")
    target = find_model(given.model, "dummy")
    cache = SAME_CACHE.get(engine.FRAMEWORK.package, {})
    if given.serve and engine.FRAMEWORK.name not in SERVERS:
        parser.error(f"--serve: of {' and '.join(SERVERS)} only, not of {given.framework}")
    if given.serve and given.engine_arg:
        parser.error("--engine-arg: of an offline engine; a server's are given by --server-arg")
    more = engine_arguments(tuple(given.engine_arg))
    arguments = engine.arguments(Start(target, "dummy", given.num_layers, False, cache | more, 2048))
    folder = Path(tempfile.mkdtemp(prefix="warm-starts-"))
    model = model_with_tokenizer(given.model, folder / "model", given.num_layers) if given.serve else None
    served = [*(f"--{name.replace('_', '-')}={value}" for name, value in cache.items()), *given.server_arg]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the first batch is of the requests that have come so far
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    if engine.FRAMEWORK.cache:
        os.environ[engine.FRAMEWORK.cache] = str(folder / "cache")
    first, rows, passed = None, list[str](), True
    for number, kind in enumerate(given.starts, 1):
        if model is None:
            seconds, found = run(engine, arguments, kind == "kcap", folder / str(number))
        else:
            seconds, found = serve(engine.FRAMEWORK.name, served, model, kind == "kcap", folder / str(number))
        row = f"{number}  {kind:5}  {seconds:5.0f} s"
        if found is not None:
            first = first or found
            wrong = faults(found, first)
            passed &= not wrong
            fused = sum(1 for call in found.calls if call.launch and call.launch.fragment)
            row = f"{mark(not wrong)} {row}  {len(found.calls):5} calls  {fused:3} with fragments  {'; '.join(wrong)}"
        else:
            row = f"    {row}"
        print(row, flush=True)
        rows.append(row)
    print("\n" + "\n".join(rows))
    sys.exit(not passed)


if __name__ == "__main__":
    main()

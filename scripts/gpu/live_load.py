"""What recording costs a server under load, and how large its Recording becomes: `vllm serve` with a real client.

    python scripts/gpu/live_load.py [--model meta-llama/Llama-3.1-8B] [--load 32 --load rate=8] [--pairs 5]

Starts `vllm serve` under `kcap record --window manual`, dummy weights and a tokenizer of made-up words, and sends the
requests of `vllm bench serve` again and again (random, 512 tokens in, 128 out): at most so many at once (`--load 32`)
or so many a second (`--load rate=8`). A pair is a round with the window closed and one with it open, in alternating
order; before each pair stands another with it closed, whose ratio to the pair's own is the A/A spread. `--plain`
begins with rounds of a server without kcap. Ends with a table, and what the Recording holds: its size, its Calls by
operator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kcap
from kcap.capture.controller import window_control
from kcap.capture.controller.frameworks import find_model
from kcap.capture.engines.vllm.tokenizer import write_tokenizer

PORT = 8765
READY_S = 400.0
LONGEST = 4096  # tokens of a request with its answer
FIGURES = ("output_throughput", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
Round = dict[str, float]


def model_with_tokenizer(model: str, folder: Path, layers: int | None) -> Path:
    """The model's configuration, and a tokenizer that has a word for each token."""
    source = Path(find_model(model, "dummy").path)
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
        (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    return folder


@contextlib.contextmanager
def server(model: Path, arguments: list[str], recorded: Path | None, log: Path) -> Iterator[None]:
    """`vllm serve` until the block ends; `recorded`: the Recording that kcap makes of it."""
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT)]
    config = json.loads((model / "config.json").read_text())
    length = min(LONGEST, config.get("max_position_embeddings", LONGEST))
    command = [*serve, "--load-format", "dummy", "--max-model-len", str(length), *arguments]
    if recorded is not None:
        command = [sys.executable, "-m", "kcap", "record", "-o", str(recorded), "--window", "manual", "--", *command]
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_S
        while not _answers():
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not become ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(120)


def _answers() -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def client_arguments(model: Path, load: str, given: argparse.Namespace) -> argparse.Namespace:
    """Of `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    rate = load.startswith("rate=")
    pace = ["--request-rate", load.removeprefix("rate=")] if rate else ["--max-concurrency", load]
    count = given.num_prompts or (round(20 * float(load.removeprefix("rate="))) if rate else max(128, 5 * int(load)))
    return parser.parse_args(
        ["--model", str(model), "--port", str(PORT), "--dataset-name", "random", "--random-input-len",
         str(given.input_len), "--random-output-len", str(given.output_len), "--num-prompts", str(count),
         "--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99", *pace]
    )  # fmt: skip


def round_of(arguments: argparse.Namespace, number: int) -> Round:
    """One run of the client; each round draws other prompts, else the server has them in its prefix cache."""
    from vllm.benchmarks.serve import main_async

    arguments.seed = number
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = asyncio.run(main_async(argparse.Namespace(**vars(arguments))))
    if found["completed"] != arguments.num_prompts:
        sys.exit(f"{found['completed']} of {arguments.num_prompts} requests were answered")
    return {name: float(found[name]) for name in FIGURES}


def shown(rounds: list[Round]) -> str:
    return "  ".join(f"{statistics.mean(each[name] for each in rounds):10.2f}" for name in FIGURES)


def pairs_of(arguments: argparse.Namespace, load: str, recorded: Path, given: argparse.Namespace) -> list[str]:
    session = window_control.find_session(recorded)
    closed, opened, loss, spread = list[Round](), list[Round](), list[float](), list[float]()
    round_of(arguments, 1)
    number = 2
    for pair in range(given.pairs):
        control = round_of(arguments, number)
        ran = {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            if on:
                window_control.open_window(session)
            ran[on] = round_of(arguments, number + 1 + on)
            if on:
                window_control.close_window(session)
        number += 3
        closed += [control, ran[False]]
        opened.append(ran[True])
        loss.append(1 - ran[True][FIGURES[0]] / ran[False][FIGURES[0]])
        spread.append(abs(1 - control[FIGURES[0]] / ran[False][FIGURES[0]]))
        print(f"load {load}, pair {pair + 1}: {loss[-1]:.2%} lost, A/A {spread[-1]:.2%}", flush=True)
    return [
        f"{load:>8}  closed  {shown(closed)}",
        f"{load:>8}  open    {shown(opened)}  loss median {statistics.median(loss):.2%}, "
        f"mean {statistics.mean(loss):.2%}; A/A median {statistics.median(spread):.2%}, at most {max(spread):.2%}",
    ]


def contents(path: Path) -> list[str]:
    """What the Recording holds, and where its bytes are."""
    recording = kcap.load(path)
    sizes = Counter[str]()
    for file in path.rglob("*"):
        if file.is_file():
            sizes[file.relative_to(path).parts[0]] += file.stat().st_size
    by_operator = Counter(call.operator for call in recording.calls)
    samples = Counter(recording.calls[sample.call].operator for sample in recording.samples)
    steps = recording.metadata.steps
    return [
        f"Recording: {sum(sizes.values()) / 1e6:.1f} MB of {sum(steps.values())} steps {steps}; complete: "
        f"{recording.metadata.complete}, dropped {recording.metadata.dropped}",
        "  " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.most_common(6)),
        f"  {len(recording.calls)} Calls: " + ", ".join(f"{name} {n}" for name, n in by_operator.most_common(12)),
        f"  {len(recording.samples)} Samples: " + ", ".join(f"{name} {n}" for name, n in samples.most_common(12)),
        f"  {len(recording.programs)} Programs, {len(recording.steps)} listed steps",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--load", action="append", help="32 and 256 at once without it")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, help="of a round")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--plain", type=int, default=0, metavar="ROUNDS", help="first so many of a server without kcap")
    parser.add_argument("--server-arg", action="append", default=[], help="one more of `vllm serve`")
    parser.add_argument("-o", "--output", type=Path, help="keep the Recording here")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="live-load-"))
    model = model_with_tokenizer(given.model, folder / "model", given.num_layers)
    loads: list[str] = given.load or ["32", "256"]
    table, recorded = list[str](), given.output or folder / "out.kcap"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if given.plain:
        with server(model, given.server_arg, None, folder / "plain.log"):
            for load in loads:
                rounds = [round_of(client_arguments(model, load, given), i) for i in range(1 + given.plain)]
                table.append(f"{load:>8}  plain   {shown(rounds[1:])}")
                print(table[-1], flush=True)
    with server(model, given.server_arg, recorded, folder / "recorded.log"):
        for load in loads:
            table += pairs_of(client_arguments(model, load, given), load, recorded, given)
            print(table[-1], flush=True)
    print("\n" + "\n".join([f"{'load':>8}  window  " + "  ".join(f"{name[:10]:>10}" for name in FIGURES), *table]))
    print("\n".join(contents(recorded)))


if __name__ == "__main__":
    main()

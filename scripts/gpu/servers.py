"""The engines' servers, each with the client that its project brings, for `live_load.py` and `warm_starts.py`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kcap.capture.controller.frameworks import find_model
from kcap.capture.engines.vllm.tokenizer import write_tokenizer

READY_S = 400.0
LONGEST = 4096  # tokens of a request with its answer
FIGURES = ("output_throughput", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
Round = dict[str, float]


@dataclass(frozen=True)
class Load:
    """`requests` of `tokens_in` and `tokens_out` tokens: at most `concurrency` at once, or `rate` of them a second.

    `uneven`: lengths are drawn, down to half of these (SGLang's up to these, vLLM's to half as much again).
    """

    requests: int
    tokens_in: int
    tokens_out: int
    concurrency: int | None = None
    rate: float | None = None
    uneven: bool = False

    def options(self) -> list[str]:
        """As both clients take them."""
        pace = ["--request-rate", str(self.rate)] if self.rate else ["--max-concurrency", str(self.concurrency)]
        lengths = ["--random-input-len", str(self.tokens_in), "--random-output-len", str(self.tokens_out)]
        return ["--num-prompts", str(self.requests), *lengths, *pace]


class VLLM:
    """`vllm serve` and `vllm bench serve`."""

    READY = "Application startup complete"

    @staticmethod
    def command(model: Path, length: int) -> list[str]:
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        return [*serve, "--max-model-len", str(length)]

    @staticmethod
    def run_client(model: Path, load: Load, seed: int, port: int) -> dict[str, Any]:
        from vllm.benchmarks.serve import add_cli_args, main_async

        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        options = ["--model", str(model), "--port", str(port), "--dataset-name", "random", *load.options()]
        options += ["--random-range-ratio", "0.5" if load.uneven else "0"]
        options += ["--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"]
        arguments = parser.parse_args([*options, "--seed", str(seed)])
        with contextlib.redirect_stdout(io.StringIO()):
            found: dict[str, Any] = asyncio.run(main_async(arguments))
        return found


class SGLang:
    """`sglang.launch_server` and `sglang.bench_serving`."""

    READY = "ready to roll"

    @staticmethod
    def command(model: Path, length: int) -> list[str]:
        serve = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        return [*serve, "--context-length", str(length)]

    @staticmethod
    def run_client(model: Path, load: Load, seed: int, port: int) -> dict[str, Any]:
        """Within this process: to import it takes up to 25 s."""
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            options = ["--backend", "sglang", "--port", str(port), "--model", str(model), "--seed", str(seed)]
            options += ["--dataset-name", "random-ids", "--disable-tqdm"]
            options += ["--random-range-ratio", "0.5" if load.uneven else "1"]
            options += [*load.options(), "--output-file", file.name]
            argv = mock.patch.object(sys, "argv", ["bench_serving", *options])
            with argv, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as said:
                warnings.simplefilter("ignore", FutureWarning)  # of the module's newer name
                try:
                    runpy.run_module("sglang.bench_serving", run_name="__main__")
                except SystemExit as ended:
                    if ended.code:
                        sys.exit(f"the client did not run: {ended.code}\n{said.getvalue()[-3000:]}")
            found: dict[str, Any] = json.loads(Path(file.name).read_text().splitlines()[-1])
        return found


SERVERS: dict[str, type[VLLM] | type[SGLang]] = {"vLLM": VLLM, "SGLang": SGLang}


def round_of(framework: str, model: Path, load: Load, seed: int, port: int) -> Round:
    """One run of the client; each round has a seed of its own, else the server has its prompts in the prefix cache."""
    found = SERVERS[framework].run_client(model, load, seed, port)
    if found["completed"] != load.requests:
        sys.exit(f"{found['completed']} of {load.requests} requests were answered")
    return {name: float(found[name]) for name in FIGURES}


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
def server(
    framework: str, model: Path, arguments: list[str], recorded: Path | None, log: Path, *options: str
) -> Iterator[int]:
    """The engine's server until the block ends, and its port.

    `recorded`: the Recording that `kcap record` with these `options` makes of it, its window opened by hand.
    """
    config = json.loads((model / "config.json").read_text())
    length = min(LONGEST, config.get("max_position_embeddings", LONGEST))
    port = free_port()
    command = [*SERVERS[framework].command(model, length), "--port", str(port), "--load-format", "dummy", *arguments]
    if recorded is not None:
        record = [sys.executable, "-m", "kcap", "record", "-o", str(recorded), "--window", "manual", *options]
        command = [*record, "--", *command]
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_S
        while SERVERS[framework].READY not in log.read_text(errors="replace"):
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not become ready:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield port
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(120)


def free_port() -> int:
    """With the one 10,000 above it, which SGLang takes, too: both below those that the system gives out itself."""
    while True:
        number = random.SystemRandom().randrange(20_000, 22_768)  # a client seeds the process's own
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", number))
            second.bind(("127.0.0.1", number + 10_000))
            return number

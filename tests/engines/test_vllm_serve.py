"""`vllm serve` recorded under `vllm bench serve`, and a worker that is killed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from mixed_batches import LINEARS
from shard_steps import steps_by_process

import kcap
from kcap.schemas.recording.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS, API_KEY = 3, "a-secret-of-the-test"
TALKS = [(20 + number, 16 + number % 3) for number in range(8)]  # tokens of each prompt, and of its answer


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process; whatever is left of its group is killed in the end."""
    running = []

    def start(words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def serving_environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """`vllm serve` asks for the version of a package `vllm`, which the CPU build is not called."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        import vllm

        version = vllm.__version__.partition("+")[0] + "+cpu"  # which tells it the platform
        known = tmp_path / "site" / f"vllm-{version}.dist-info"
        known.mkdir(parents=True)
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return {**environment, "PYTHONPATH": str(known.parent)}
    return environment


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if ready():
            return
        time.sleep(0.2)
    raise AssertionError("not ready in time")


@pytest.fixture
def talks(model: Path, tmp_path: Path) -> Path:
    """The model with a tokenizer of as many words as it has tokens, and a JSONL of prompts in them."""
    tokenizers = pytest.importorskip("tokenizers")
    directory = shutil.copytree(model, tmp_path / "model")
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {"[UNK]": 0, **{f"w{number}": number for number in range(1, vocabulary)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(known))
    lines = [
        {"prompt": " ".join(f"w{100 + 50 * number + i}" for i in range(tokens)), "output_tokens": output}
        for number, (tokens, output) in enumerate(TALKS)
    ]
    (directory / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


CLIENT = """
import json, os, subprocess, sys, urllib.request

port, output, *bench = sys.argv[1:]
window = [sys.executable, "-m", "kcap", "window"]

def complete(prompt):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()

subprocess.run(bench, check=True)
subprocess.run([*window, "stop", output], check=True)
complete([7] * 50)
subprocess.run([*window, "start", output], check=True)
complete([8] * 11)
"""


def test_a_server_under_vllms_own_load_counts_what_ran_in_its_windows(
    talks: Path, serving_environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("pandas", reason="vllm bench serve reads JSONL with pandas")
    port, output = free_port(), tmp_path / "out"
    vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    load = f"--port {port} --model {talks} --dataset-path {talks / 'talks.jsonl'} --num-prompts {len(TALKS)}"
    how = "--backend openai --endpoint /v1/completions --served-model-name tiny --dataset-name custom --ignore-eos"
    rate = "--request-rate 30 --max-concurrency 3 --custom-output-len -1 --skip-chat-template --disable-tqdm"
    bench = [*vllm, "bench", "serve", *load.split(), *how.split(), *rate.split(), "--ready-check-timeout-sec", "0"]
    (tmp_path / "client.py").write_text(CLIENT)
    client = shlex.join([sys.executable, str(tmp_path / "client.py"), str(port), str(output), *bench])
    serve = [*vllm, "serve", str(talks), "--served-model-name", "tiny", "--port", str(port), "--api-key", API_KEY]
    options = "--load-format dummy --dtype bfloat16 --max-model-len 512 --enforce-eager --no-enable-prefix-caching"
    record = [sys.executable, "-m", "kcap", "record", "-o", str(output), "--client", client, "--"]
    env = {**serving_environment, "OPENAI_API_KEY": API_KEY}
    ran = subprocess.run([*record, *serve, *options.split()], env=env, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(output)
    assert_recorded_whole(recording)
    (_, loaded), (first, alone) = (window.values() for window in recording.metadata.windows)
    assert (first, alone) == (loaded + 4 + 1, 4), "the request between the windows ran four steps"
    assert not [file for file in output.rglob("*") if file.is_file() and API_KEY.encode() in file.read_bytes()]
    assert "--api-key REDACTED" in " ".join(recording.metadata.command)


def assert_recorded_whole(recording: Recording) -> None:
    assert recording.metadata.complete
    assert recording.metadata.model
    steps = sum(recording.metadata.steps.values())
    assert {"prefill", "decode"} <= set(recording.metadata.steps)
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(prompt + output - 1 for prompt, output in [*TALKS, (11, 4)])
    assert 1 < max(batch["sequences"] for batch in recording.metadata.batches) <= 3, "requests ran together"
    linears = sum(call.total for call in recording.kernels() if call.operator in LINEARS)
    attention = sum(call.total for call in recording.kernels() if call.operator == "_C::cpu_attention_with_kv_cache")
    assert (linears, attention) == ((4 * LAYERS + 1) * steps, LAYERS * steps)


def test_a_worker_that_is_killed_leaves_a_partial_recording(
    started: Any, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    options = "--load-format dummy --eager --num-prompts 2 --input-len 16 --output-len 2000"
    arguments = "skip_tokenizer_init=true dtype=bfloat16 max_model_len=2048"
    words = [word for argument in arguments.split() for word in ("--engine-arg", argument)]
    record = [sys.executable, "-m", "kcap", "record", "-o", str(output), "--model", str(model)]
    process = started([*record, *options.split(), *words], environment)

    def working() -> list[int]:
        return [number for number, steps in steps_by_process(tmp_path).items() if steps >= 20]

    wait_until(lambda: bool(working()), process)
    os.kill(working()[0], signal.SIGKILL)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 3, said
    assert "partial" in said
    assert "Traceback" not in said.partition("the engine ended")[0]
    recording = kcap.load(output)
    assert not recording.metadata.complete
    steps = sum(recording.metadata.steps.values())
    assert 20 <= steps < 2000
    assert sum(call.total for call in recording.kernels() if call.operator in LINEARS) == 13 * steps
    listed = [step.index for step in recording.steps]
    assert listed == list(range(len(listed)))
    assert 0 < len(listed) <= steps, "the lines of the last steps may have waited to be written"

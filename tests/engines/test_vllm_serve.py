"""A user's own `vllm serve`, recorded; and a worker that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import kcap
from kcap.capture.shards import STEPS, Counts
from kcap.schemas.recording import Recording

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

LAYERS, API_KEY = 3, "a-secret-of-the-test"
PROMPTS = [[50_000 + 97 * number + i for i in range(20 + number)] for number in range(6)]
OUTPUT = 8


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


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
        return json.loads(answer.read() or "null")


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if ready():
            return
        time.sleep(0.2)
    raise AssertionError("not ready in time")


def answers(port: int) -> bool:
    try:
        asked(port, "/health")
    except OSError:
        return False
    return True


def complete(port: int, prompt: list[int]) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    return int(asked(port, "/v1/completions", body)["usage"]["completion_tokens"])


def test_a_server_with_concurrent_requests_stopped_by_ctrl_c(
    started: Any, model: Path, serving_environment: dict[str, str], tmp_path: Path
) -> None:
    port, output = free_port(), tmp_path / "out"
    serve = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "tiny"]
    options = "--load-format dummy --skip-tokenizer-init --dtype bfloat16 --max-model-len 512 --enforce-eager"
    where = ["--host", "127.0.0.1", "--port", str(port), "--api-key", API_KEY, "--no-enable-prefix-caching"]
    record = [sys.executable, "-m", "kcap", "record", "-o", str(output), "--"]
    process = started([*record, *serve, *options.split(), *where], serving_environment)
    log: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        pool.submit(lambda: log.extend(process.stderr))
        wait_until(lambda: answers(port), process)
        generated = list(pool.map(lambda prompt: complete(port, prompt), PROMPTS))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    assert process.returncode == 0, "".join(log)
    assert generated == [OUTPUT] * len(PROMPTS)
    assert_recorded_whole(kcap.load(output))
    assert not [file for file in output.rglob("*") if file.is_file() and API_KEY.encode() in file.read_bytes()]
    assert "--api-key REDACTED" in " ".join(kcap.load(output).metadata.command)


def assert_recorded_whole(recording: Recording) -> None:
    assert recording.metadata.complete
    assert recording.metadata.model
    steps = sum(recording.metadata.steps.values())
    assert {"prefill", "decode"} <= set(recording.metadata.steps)
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) + len(PROMPTS) * (OUTPUT - 1)
    assert max(batch["sequences"] for batch in recording.metadata.batches) > 1, "the requests ran together"
    linears = sum(call.total for call in recording.kernels() if call.operator == "_C::onednn_mm")
    attention = sum(call.total for call in recording.kernels() if call.operator == "_C::cpu_attention_with_kv_cache")
    assert (linears, attention) == ((4 * LAYERS + 1) * steps, LAYERS * steps)


def test_a_worker_that_is_killed_leaves_a_partial_recording(
    started: Any, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    options = "--load-format dummy --eager --num-prompts 2 --input-len 16 --output-len 480"
    arguments = "skip_tokenizer_init=true dtype=bfloat16 max_model_len=512"
    words = [word for argument in arguments.split() for word in ("--engine-arg", argument)]
    record = [sys.executable, "-m", "kcap", "record", "-o", str(output), "--model", str(model)]
    process = started([*record, *options.split(), *words], environment)

    def counts() -> Path | None:
        found = [path for path in tmp_path.glob(".out.*/shards/*.counts") if Counts(path).cells[STEPS] >= 20]
        return found[0] if found else None

    wait_until(lambda: counts() is not None, process)
    shard = counts()
    assert shard is not None
    os.kill(int(shard.stem.rpartition("-")[2]), signal.SIGKILL)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 3, said
    assert "partial" in said
    assert "Traceback" not in said.partition("the engine ended")[0]
    recording = kcap.load(output)
    assert not recording.metadata.complete
    steps = sum(recording.metadata.steps.values())
    assert 20 <= steps < 496
    assert sum(call.total for call in recording.kernels() if call.operator == "_C::onednn_mm") == 13 * steps
    assert [step.index for step in recording.steps] == list(range(steps))

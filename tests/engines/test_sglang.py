"""The real SGLang, recorded by an interpreter of an environment of its own: KCAP_SGLANG_PYTHON, or what
scripts/environment-sglang has made. The counts that its model's shape demands, and outputs that recording leaves alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcap
from kcap.capture.config import SESSION_VARIABLE, Session
from kcap.capture.merge import merge
from kcap.schemas.recording import Program, Recording
from kcap.schemas.values import Group

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("KCAP_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: scripts/environment-sglang, or KCAP_SGLANG_PYTHON"),
]

LAYERS, OUTPUT, CHUNK = 2, 4, 16
SHARED = [50_000 + 7 * i for i in range(18)]
PROMPTS = [[*SHARED, 1, 2], [51_000 + 7 * i for i in range(20)], [*SHARED, 3, 4], [*SHARED, 5, 6]]
HITS = [len(SHARED)] * 2
# Two requests at a time, in chunks; one that prefills may join one that decodes.
BATCHING = {"max_running_requests": 2, "chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}
REGIONS = {"RMSNorm": 2 * LAYERS + 1, "RotaryEmbedding": LAYERS, "SiluAndMul": LAYERS}  # in a step
API_KEY = "a-secret-of-the-test"


@pytest.fixture(scope="module")
def env(own_key: None) -> dict[str, str]:
    """No hub; stand-ins for what has no build for a CPU, where there is no GPU.

    The clone that the tests run in stays off the path: its kcap.egg-info may be of another environment, and older.
    """
    kept = {name: value for name, value in os.environ.items() if name not in (SESSION_VARIABLE, "SGLANG_PLUGINS")}
    stubs = {} if os.path.exists("/dev/nvidiactl") else {"PYTHONPATH": str(ROOT / "tests/engines/sglang_cpu/stubs")}
    return {**kept, **stubs, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="module")
def generated(model: Path, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    """`generated(recorded)`: the tokens of PROMPTS, and the Recording where there is one."""

    def run(recorded: bool) -> tuple[list[list[int]], Recording | None]:
        directory = tmp_path_factory.mktemp("sglang")
        session = Session(str(directory / "shards"), framework="SGLang")
        session.write()
        override = json.dumps({"num_hidden_layers": LAYERS})
        always = {"model_path": str(model), "load_format": "dummy", "json_model_override_args": override}
        job = {
            "session": str(session.file),
            "workload": {"prompts": PROMPTS, "output_len": OUTPUT},
            "engine_arguments": always | BATCHING | {"skip_tokenizer_init": True, "context_length": 256},
            "outputs": str(directory / "outputs.json"),
        }
        (directory / "job.json").write_text(json.dumps(job))
        named = {SESSION_VARIABLE: str(session.file)} if recorded else {}
        command = [str(PYTHON), "-m", "kcap.capture.engines.sglang_offline", str(directory / "job.json")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**env, **named})
        assert (directory / "outputs.json").exists(), ran.stderr
        recording = merge(session, directory / "out") if recorded else None
        return json.loads((directory / "outputs.json").read_text()), recording

    return run


@pytest.fixture(scope="module")
def ran(generated: Callable[[bool], Any]) -> tuple[list[list[int]], Recording]:
    return generated(True)


@pytest.fixture(scope="module")
def recording(ran: tuple[list[list[int]], Recording]) -> Recording:
    return ran[1]


def operators(recording: Recording, program: Program, kind: str = "kernel") -> Counter[str]:
    return Counter(call.operator for call in recording.ran(program) if call.kind == kind)


def assert_counts_of_a_llama(recording: Recording) -> None:
    """What every step must hold, whatever its phase. PyTorch's attention runs once for each sequence."""
    sequences = {step.program: step.sequences for step in recording.steps}
    for number, program in enumerate(recording.programs):
        found = operators(recording, program)
        assert found["aten::linear"] + found["aten::matmul"] == 4 * LAYERS + 1
        assert found["aten::scaled_dot_product_attention"] == LAYERS * sequences[number]
        assert found["aten::index_put_"] == 2 * LAYERS, "keys and values into the cache"
        assert found["aten::argmax"] == 1
        regions = operators(recording, program, "region")
        assert {name: regions[f"sglang_op::{name}"] for name in REGIONS} == REGIONS
    totals = Counter[str]()
    for call in recording.calls:
        totals[call.operator] += call.total
    ranks = recording.metadata.world_size
    assert totals["aten::linear"] + totals["aten::matmul"] == ranks * (4 * LAYERS + 1) * sum(
        recording.metadata.steps.values()
    )


def test_every_step_has_the_linears_and_attention_of_its_layers(recording: Recording) -> None:
    assert_counts_of_a_llama(recording)
    assert recording.metadata.complete
    assert (recording.metadata.framework, recording.metadata.layers_recorded) == ("SGLang", LAYERS)
    assert recording.metadata.framework_version


def test_prefill_decode_and_mixed_are_told_apart(recording: Recording) -> None:
    """The first prompt's chunk fills a step; its rest and the second's first chunk the next; and so on."""
    assert [(step.phase, step.queries) for step in recording.steps] == [
        ("prefill", [16]),
        ("prefill", [4, 12]),
        ("mixed", [8, 1]),
        ("decode", [1, 1]),
        ("decode", [1, 1]),
        ("decode", [1]),
        ("prefill", [2]),
        ("mixed", [2, 1]),
        ("decode", [1, 1]),
        ("decode", [1, 1]),
        ("decode", [1]),
    ]
    assert [step.lengths for step in recording.steps][:4] == [[16], [20, 12], [20, 21], [21, 22]]


def test_hits_in_the_radix_cache_are_in_their_steps(recording: Recording) -> None:
    hits = [step.cached for step in recording.steps if step.cached]
    assert hits == [[len(SHARED)], [len(SHARED), 0]]


def test_nothing_from_start_up_is_counted(recording: Recording) -> None:
    scheduled = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert scheduled == sum(map(len, PROMPTS)) - sum(HITS) + len(PROMPTS) * (OUTPUT - 1)


def test_the_tokens_are_the_same_with_and_without(ran: Any, generated: Callable[[bool], Any]) -> None:
    assert ran[0] == generated(False)[0]
    assert len({tuple(tokens) for tokens in ran[0]}) > 1
    assert {len(tokens) for tokens in ran[0]} == {OUTPUT}


def kcap_record(*words: object) -> list[str]:
    return [str(PYTHON), "-m", "kcap", "record", *map(str, words)]


def test_two_ranks_count_the_same(env: dict[str, str], tmp_path: Path) -> None:
    """By the command line, with kcap's own configuration of the model."""
    words = "--model kcap/tiny-llama --framework SGLang --load-format dummy --num-prompts 2 --input-len 16".split()
    more = ["--output-len", OUTPUT, "--engine-arg", "tp_size=2", "-o", tmp_path / "out"]
    env = {**env, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ran = subprocess.run(kcap_record(*words, *more), capture_output=True, text=True, timeout=600, env=env)
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(tmp_path / "out")
    assert recording.metadata.world_size == 2
    by_rank = Counter[tuple[str, int]]()
    for call in recording.kernels(hidden=True):
        for count in call.counts:
            by_rank[call.operator, count.rank] += count.count
    names = {name for name, _ in by_rank}
    assert {name: by_rank[name, 0] for name in names} == {name: by_rank[name, 1] for name in names}
    steps = sum(recording.metadata.steps.values())
    assert by_rank["c10d::allreduce_", 0] == (2 * LAYERS + 1) * steps
    assert by_rank["aten::linear", 0] + by_rank["aten::matmul", 0] == (4 * LAYERS + 1) * steps
    groups = {call.args[1].value for call in recording.calls if call.operator == "c10d::allreduce_"}
    assert groups == {Group(size=2, rank=0), Group(size=2, rank=1)}


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
        return json.loads(answer.read() or "null")


def test_a_server_stopped_by_ctrl_c_counts_its_requests_and_not_its_warm_up(
    model: Path, env: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    options = "--load-format dummy --skip-tokenizer-init --context-length 256 --max-total-tokens 4096"
    cpu = "" if os.path.exists("/dev/nvidiactl") else " --device cpu --attention-backend torch_native"
    server = [PYTHON, "-m", "sglang.launch_server", "--model-path", model, *(options + cpu).split()]
    words = ["-o", tmp_path / "out", "--", *server, "--port", port, "--api-key", API_KEY]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            kcap_record(*words), env={**env, "SGLANG_USE_CPU_ENGINE": "1"}, stdout=log, stderr=log
        )
        try:
            ready(process, port, tmp_path / "log")
            time.sleep(1)  # for the windows to open again after the warm-up
            for prompt in PROMPTS[:2]:
                params = {"max_new_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
                answer = asked(port, "/generate", {"input_ids": prompt, "sampling_params": params})
                assert len(answer["output_ids"]) == OUTPUT
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=120)
    recording = kcap.load(tmp_path / "out")
    assert recording.metadata.complete
    assert recording.metadata.framework == "SGLang"
    assert recording.metadata.steps == {"prefill": 2, "decode": 2 * (OUTPUT - 1)}
    assert "--api-key REDACTED" in " ".join(recording.metadata.command)


def ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Returns when the server has warmed itself up. Asked for its health it would run a forward."""
    deadline = time.monotonic() + 300
    while "ready to roll" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)

"""A real SGLang server that an agent asks, stopped by Ctrl-C: turns, requests and steps, joined and exact."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from agent_load import (
    CLIENT,
    MAX_LEN,
    assert_blocks_are_shared_with_the_turn_before,
    assert_refused_and_abandoned_requests_are_turns,
    assert_requests_sum_to_steps,
    assert_sessions_are_those_of_the_client,
    assert_tokens_are_those_of_the_engine,
    write_model,
)
from sglang_runs import GPU, PYTHON, command, environment, marks
from test_vllm_serve import free_port

import kcap
from kcap.capture.controller.models import find_config
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.turns import read_turns

pytest.importorskip("tokenizers")
pytestmark = marks

SESSIONS = 2
API_KEY = "a-secret-of-the-test"
OPTIONS = (
    "--load-format dummy --dtype bfloat16 --served-model-name tiny --tool-call-parser hermes --enable-cache-report"
)


def served(model: Path, directory: Path) -> int:
    """A server, the agent, Ctrl-C: the exit status."""
    port = free_port()
    cpu = "" if GPU else " --device cpu --attention-backend torch_native --max-total-tokens 8192"
    server = [PYTHON, "-m", "sglang.launch_server", "--model-path", model, *(OPTIONS + cpu).split()]
    server += ["--context-length", MAX_LEN, "--port", port, "--api-key", API_KEY]
    env = environment(SGLANG_USE_CPU_ENGINE="1", API_KEY=API_KEY)
    (directory / "client.py").write_text(CLIENT)
    client = [PYTHON, directory / "client.py", port, directory / "answers.json", SESSIONS]
    with (directory / "log").open("w") as log:
        record = command("-o", directory / "out", "--agent-trace", "--", *server)
        process = subprocess.Popen(record, env=env, stdout=log, stderr=log)
        try:
            ready(process, directory / "log")
            time.sleep(4)  # for the windows to open again after the warm-up
            subprocess.run([*map(str, client)], env=env, check=True, timeout=300)
            process.send_signal(signal.SIGINT)
            return process.wait(timeout=120)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=120)


def ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server has warmed itself up. Asked for its health it would run a forward."""
    deadline = time.monotonic() + 600
    while "ready to roll" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def agent(own_key: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, list[dict[str, Any]]]:
    """The Recording, and what the client was answered."""
    source = find_config("kcap/tiny-llama")
    assert source is not None
    directory = tmp_path_factory.mktemp("server")
    model = write_model(json.loads((source / "config.json").read_text()), directory / "model")
    assert served(model, directory) == 0, (directory / "log").read_text()
    return kcap.load(directory / "out"), json.loads((directory / "answers.json").read_text())


def test_a_server_stopped_by_ctrl_c_counts_its_requests_and_not_its_warm_up(agent: Any) -> None:
    recording, _ = agent
    assert recording.metadata.complete
    assert recording.metadata.framework == "SGLang"
    assert len(recording.requests) == sum(len(turn.requests) for turn in read_turns(recording.path))
    assert_requests_sum_to_steps(recording)


def test_every_turn_has_the_tokens_that_the_engine_told_its_client(agent: Any) -> None:
    recording, answers = agent
    assert len(answers) == 3 * SESSIONS + 3
    assert_tokens_are_those_of_the_engine(recording, answers)
    assert_blocks_are_shared_with_the_turn_before(recording)


def test_sessions_are_told_and_so_is_who_got_no_answer(agent: Any) -> None:
    assert_sessions_are_those_of_the_client(*agent)
    assert_refused_and_abandoned_requests_are_turns(*agent)


def test_steps_name_their_requests(agent: Any) -> None:
    recording, _ = agent
    steps = recording.steps
    assert all(len(step.requests) == step.sequences for step in steps)
    listed = [place for step in steps for place in step.requests]
    ran = {place: request.prefills + request.decodes for place, request in enumerate(recording.requests)}
    assert {place: listed.count(place) for place in ran} == ran, "all of these few steps are listed"


def test_neither_an_api_key_nor_a_text_is_in_the_recording(agent: Any) -> None:
    recording, _ = agent
    assert "--api-key REDACTED" in " ".join(recording.metadata.command)
    for file in recording.path.rglob("*"):
        assert not file.is_file() or not any(word in file.read_bytes() for word in (API_KEY.encode(), b"sunny"))

"""An agent of ten sessions with tool calls on the real `vllm serve`: turns, requests and steps, joined and exact."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from agent_load import (
    CLIENT,
    MAX_LEN,
    SESSIONS,
    assert_blocks_are_shared_with_the_turn_before,
    assert_refused_and_abandoned_requests_are_turns,
    assert_requests_sum_to_steps,
    assert_sessions_are_those_of_the_client,
    assert_tokens_are_those_of_the_engine,
    write_model,
)
from test_vllm_serve import free_port

import kcap
from kcap.capture.controller.models import find_config
from kcap.schemas.recording.recording import Recording
from kcap.schemas.recording.turns import read_turns
from kcap.schemas.validation.recording import check_recording
from kcap.schemas.validation.report import Report

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.engine

OPTIONS = "--served-model-name tiny --load-format dummy --dtype bfloat16 --enforce-eager --enable-prompt-tokens-details"
TOOLS = "--enable-auto-tool-choice --tool-call-parser hermes --enable-prefix-caching"


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = find_config("kcap/tiny-llama")
    assert source is not None
    return write_model(json.loads((source / "config.json").read_text()), tmp_path_factory.mktemp("agents") / "model")


def served(output: Path, model: Path, port: int, env: dict[str, str], *words: str) -> Any:
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    serve += ["--max-model-len", str(MAX_LEN), *OPTIONS.split(), *TOOLS.split()]
    serve += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    record = [sys.executable, "-m", "kcap", "record", "-o", str(output), "--agent-trace", *words]
    command = [*record, "--", *serve]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def agent(agent_model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Recording, and what the client was answered."""
    folder, port = tmp_path_factory.mktemp("agent"), free_port()
    (folder / "client.py").write_text(CLIENT)
    client = [sys.executable, str(folder / "client.py"), str(port), str(folder / "answers.json"), str(SESSIONS)]
    ran = served(folder / "out", agent_model, port, environment, "--client", shlex.join(client))
    assert ran.returncode == 0, ran.stderr
    return kcap.load(folder / "out"), json.loads((folder / "answers.json").read_text())


def test_every_turn_has_the_tokens_that_the_engine_told_its_client(agent: Any) -> None:
    recording, answers = agent
    assert len(answers) == 3 * SESSIONS + 3
    assert_tokens_are_those_of_the_engine(recording, answers)


def test_the_sum_over_all_requests_is_what_all_steps_computed(agent: Any) -> None:
    assert_requests_sum_to_steps(agent[0])


def test_sessions_are_told_by_what_their_turns_repeat(agent: Any) -> None:
    assert_sessions_are_those_of_the_client(*agent)


def test_a_refused_request_and_a_client_that_goes_away_are_turns(agent: Any) -> None:
    assert_refused_and_abandoned_requests_are_turns(*agent)


def test_no_text_is_in_the_recording_and_it_is_whole(agent: Any) -> None:
    recording, _ = agent
    for file in recording.path.rglob("*"):
        assert not file.is_file() or b"sunny" not in file.read_bytes()
    report = Report()
    check_recording(report, recording.path)
    assert report.problems == []


def test_the_blocks_of_prompts_tell_what_the_cache_can_have(agent: Any) -> None:
    """Each turn's prompt begins as that of the turn before; what was found is whole blocks."""
    recording, _ = agent
    assert_blocks_are_shared_with_the_turn_before(recording)
    assert all(request.cached % recording.metadata.block_size == 0 for request in recording.requests)


def test_show_by_turn_lists_sessions_with_their_turns(agent: Any) -> None:
    recording, answers = agent
    shown = json.loads(kcap_show(recording.path, "--by", "turn", "--json"))
    usage = [answer["usage"] for answer in answers]
    assert shown["total"]["prompt"] >= sum(tokens["prompt_tokens"] for tokens in usage)
    rows = [row for row in shown["rows"] if "calls get_weather" in row["name"]]
    assert len(rows) == SESSIONS and all(row["gpu_us"] > 0 for row in rows)
    total = sum(row["gpu_us"] for row in shown["rows"]) + shown["no_request"]["us"]
    assert total == pytest.approx(shown["total_us"])
    assert "1: 3 turns" in kcap_show(recording.path, "--by", "session")


def kcap_show(path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "kcap", "show", str(path), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def answered_requests(recording: Recording) -> list[int]:
    """The places of those whose answer was sent whole."""
    turns = read_turns(recording.path)
    return [turn.requests[0] for turn in turns if turn.status == 200 and not turn.aborted]


@pytest.fixture(scope="module")
def again(agent: Any, agent_model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Recording of its turns, sent again one session after the other."""
    output = tmp_path_factory.mktemp("again") / "out"
    words = ("--workload", str(agent[0].path), "--concurrency", "1", "--speed", "1000")
    ran = served(output, agent_model, free_port(), environment, *words)
    assert ran.returncode == 0, ran.stderr
    whole = len(answered_requests(agent[0]))
    assert f"{whole} of {whole} turns answered" in ran.stderr
    return kcap.load(output)


def tokens_of(recording: Recording, places: Iterable[int]) -> list[tuple[int, int, int]]:
    ran = [recording.requests[place] for place in places]
    return sorted((request.prompt, request.cached, request.generated) for request in ran)


def test_turns_that_are_sent_again_have_the_same_tokens_and_hits(agent: Any, again: Recording) -> None:
    assert tokens_of(again, answered_requests(again)) == tokens_of(agent[0], answered_requests(agent[0]))
    assert again.metadata.block_size == agent[0].metadata.block_size
    assert_requests_sum_to_steps(again)


def test_turns_are_run_without_a_server(agent: Any, agent_model: Path, kcap_record: Any, tmp_path: Path) -> None:
    arguments = [f"--engine-arg=max_model_len={MAX_LEN}", "--engine-arg=dtype=bfloat16", "--load-format", "dummy"]
    load = ("--workload", agent[0].path, "--concurrency", "1", "--speed", "1000")
    ran = kcap_record(tmp_path / "out", "--model", agent_model, *arguments, "--eager", *load)
    assert ran.returncode == 0, ran.stderr
    recording = kcap.load(tmp_path / "out")
    assert tokens_of(recording, range(len(recording.requests))) == tokens_of(agent[0], answered_requests(agent[0]))
    assert_requests_sum_to_steps(recording)

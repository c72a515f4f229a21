"""The process that runs vLLM for a recording, with an engine that is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from kcap.capture.config import Session
from kcap.capture.engines import vllm_offline
from kcap.capture.window import StepShape, Window
from kcap.capture.workload import Workload


class Engine:
    """Each request ends with the first step."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100)
        self.waiting: list[str] = []

    def add_request(self, number: str, prompt: object, params: object) -> None:
        self.waiting.append(number)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        done, self.waiting = self.waiting, []
        return [SimpleNamespace(request_id=number, outputs=[SimpleNamespace(token_ids=[7])]) for number in done]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_offline, "_stop", lambda session: None)
    session = Session(str(tmp_path / "shards"), check_coverage=True)
    session.write()
    workload = {"num_prompts": 2, "input_len": 4, "output_len": 1}
    job = {"session": str(session.file), "workload": workload, "engine_arguments": {}}
    (tmp_path / "job.json").write_bytes(orjson.dumps({**job, "outputs": str(tmp_path / "outputs.json")}))
    return tmp_path / "job.json"


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    llm = SimpleNamespace(llm_engine=Engine(), reset_prefix_cache=lambda: answer)
    module = SimpleNamespace(LLM=lambda **arguments: llm, SamplingParams=lambda **params: params)
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_a_prefix_cache_that_cannot_be_emptied_ends_the_recording(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        vllm_offline.main(str(job))
    assert not job.with_name("outputs.json").exists()


@pytest.mark.parametrize("answer", [True, None])
def test_a_prefix_cache_that_was_emptied_lets_it_go_on(
    answer: object, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, answer)
    vllm_offline.main(str(job))
    assert orjson.loads(job.with_name("outputs.json").read_bytes()) == [[7], [7]]


class Endless(Engine):
    """Each request has one more token after each step, which a window in this process records."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window, self.steps = window, 0

    def step(self) -> list[Any]:
        self.steps += 1
        self.window.begin(StepShape("decode", [1], [self.steps]))
        self.window.end()
        tokens = SimpleNamespace(token_ids=[7] * self.steps)
        return [SimpleNamespace(request_id=number, outputs=[tokens]) for number in self.waiting]


def test_a_limit_of_steps_ends_the_generation_at_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, True)
    session = Session(str(tmp_path / "shards"), steps=3, warmup_steps=2, recorder="python")
    session.write()
    window = Window(session)
    window.start()
    engine = Endless(window)
    outputs = vllm_offline._generate(
        SimpleNamespace(llm_engine=engine), [[1, 2], [3]], Workload(output_len=1000), session
    )
    assert engine.steps == 5
    assert outputs == [[7] * 5] * 2

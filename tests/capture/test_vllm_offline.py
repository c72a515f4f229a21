"""The process that runs vLLM for a recording, with an engine that is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from kcap.capture.engines.vllm import offline
from kcap.capture.session import Session
from kcap.capture.window.window import StepShape, Window


class Engine:
    """Each request ends with the first step."""

    def __init__(self, runner: str = "generate") -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100, runner_type=runner)
        self.waiting: list[str] = []
        self.asked: list[object] = []

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("token_classify", "classify")

    def add_request(self, number: str, prompt: object, params: object) -> None:
        self.waiting.append(number)
        self.asked.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        done, self.waiting = self.waiting, []
        pooled = self.model_config.runner_type == "pooling"
        outputs = SimpleNamespace(data=None) if pooled else [SimpleNamespace(token_ids=[7])]
        return [SimpleNamespace(request_id=number, outputs=outputs) for number in done]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(offline, "close_shards", lambda session: None)
    session = Session(str(tmp_path / "shards"), check_coverage=True)
    session.write()
    workload = {"num_prompts": 2, "input_len": 4, "output_len": 1}
    job = {"session": str(session.file), "workload": workload, "engine_arguments": {"model": "m"}}
    (tmp_path / "job.json").write_bytes(orjson.dumps({**job, "outputs": str(tmp_path / "outputs.json")}))
    return tmp_path / "job.json"


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: object, engine: Engine | None = None) -> None:
    llm = SimpleNamespace(llm_engine=engine or Engine(), reset_prefix_cache=lambda: answer)
    params = dict.fromkeys(("SamplingParams", "PoolingParams"), lambda **params: params)
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(ModelConfig=None))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **arguments: llm, **params))


def test_a_prefix_cache_that_cannot_be_emptied_ends_the_recording(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        offline.main(str(job))
    assert not job.with_name("outputs.json").exists()


def test_a_pooling_model_is_asked_for_what_it_offers(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(runner="pooling")
    stand_in(monkeypatch, True, engine)
    offline.main(str(job))
    assert engine.asked == [{"task": "classify"}] * 4  # the profiled steps' two, and the counted ones'
    assert orjson.loads(job.with_name("outputs.json").read_bytes()) == [[], []]


@pytest.mark.parametrize("answer", [True, None])
def test_a_prefix_cache_that_was_emptied_lets_it_go_on(
    answer: object, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, answer)
    offline.main(str(job))
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
    loads: list[list[Any]] = [[[1, 2], [3]], [[4]]]
    outputs = offline._generate(SimpleNamespace(llm_engine=engine), loads, 1000, session)
    assert engine.steps == 5
    assert engine.waiting == ["0", "1"], "the next load is not begun"
    assert outputs == [[7] * 5] * 2 + [[]]


class Orderly(Engine):
    """Each request has its own number as its tokens, as many as it asked for, one a step; the last come out first."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[list[str], int]] = []
        self.lengths: dict[str, int] = {}
        self.left = 0

    def add_request(self, number: str, prompt: Any, params: Any) -> None:
        assert number not in self.waiting
        if not self.waiting:
            self.runs.append(([], params["max_tokens"]))
            self.left = params["max_tokens"]
        self.waiting.append(number)
        self.runs[-1][0].append(number)
        self.lengths[number] = len(prompt["prompt_token_ids"])

    def step(self) -> list[Any]:
        self.left -= 1
        numbers = self.waiting[::-1]
        if self.left == 0:
            self.waiting = []
        tokens = self.runs[-1][1] - self.left
        return [
            SimpleNamespace(request_id=f"{number}-ab12", outputs=[SimpleNamespace(token_ids=[int(number)] * tokens)])
            for number in numbers
        ]


def test_a_load_is_submitted_whole_when_the_one_before_is_done(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = orjson.loads(job.read_bytes())
    loads = {"num_prompts": [1, 3, 2], "input_len": [4, 5, 6], "output_len": 12}
    job.write_bytes(orjson.dumps({**asked, "workload": loads}))
    engine = Orderly()
    stand_in(monkeypatch, True, engine)
    offline.main(str(job))
    whole = [["0"], ["1", "2", "3"], ["4", "5"]]
    assert engine.runs == [(numbers, 8) for numbers in whole] + [(numbers, 12) for numbers in whole]
    assert list(engine.lengths.values()) == [4, 5, 5, 5, 6, 6]
    assert orjson.loads(job.with_name("outputs.json").read_bytes()) == [[number] * 12 for number in range(6)]


def test_an_engine_of_another_process_is_paused_while_a_load_is_submitted(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Orderly()
    stand_in(monkeypatch, True, engine)
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(offline, "_can_pause", lambda engine: True)
    call = lambda name, *arguments: calls.append((name, len(engine.waiting)))  # noqa: E731
    engine.engine_core = SimpleNamespace(call_utility=call, shutdown=lambda: None)  # type: ignore[attr-defined]
    offline.main(str(job))
    assert calls == [("pause_scheduler", 0), ("resume_scheduler", 2)] * 2

"""The process that runs SGLang for a recording, with an engine that is none."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from kcap.capture.engines.sglang import offline
from kcap.capture.session import Session
from kcap.capture.shards.counts import CLOSED, Counts
from kcap.capture.turns.sender import Load, MadeUpPrompt, Request
from kcap.capture.window.profiled import TOKENS


class Engine:
    """Each request gets as many tokens as it asks for. `flushes`: what each emptying of the cache answers."""

    def __init__(self, flushes: list[bool], arguments: dict[str, Any], session: Session) -> None:
        self.arguments, self.flushes, self.session = arguments, flushes, session
        self.tokenizer_manager = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=100, is_generation=arguments.get("is_generation", True))
        )
        self.tokenizer_manager.generate_request = self.embed
        self.tokenizer_manager.tokenizer = lambda text: {"input_ids": [len(word) for word in text.split()]}
        self.generated: list[tuple[int, int, Any]] = []
        self.embedded: list[Any] = []
        self.over = False
        self.aborted = threading.Event()
        self.tokenizer_manager.abort_request = lambda abort_all: abort_all and self.aborted.set()
        self.loop = SimpleNamespace(call_soon_threadsafe=lambda call: call(), run_until_complete=asyncio.run)

    async def async_generate(
        self, sampling_params: Any, prompt: Any = None, input_ids: Any = None, rid: str | None = None
    ) -> Any:
        tokens, requests = sampling_params["max_new_tokens"], input_ids or prompt
        if rid is not None:
            self.generated.append((int(rid), tokens, input_ids))
            return {"output_ids": [7] * tokens}
        assert all(isinstance(request, str if prompt else list) for request in requests)
        self.generated.append((len(requests), tokens, self.session.profile_file.exists()))
        if self.session.steps is not None:
            assert self.aborted.wait(30), "it would go on to its last token"
            return [{"output_ids": [7] * self.session.steps}, {}]
        return [{"output_ids": [7] * tokens} for _ in requests]

    async def embed(self, asked: SimpleNamespace) -> AsyncIterator[Any]:
        ids = asked.input_ids
        self.embedded.append(ids)
        yield [{"embedding": [0.5]} for _ in ids] if isinstance(ids[0], list) else {"embedding": [0.5]}

    def flush_cache(self) -> Any:
        return SimpleNamespace(success=self.flushes.pop(0) if len(self.flushes) > 1 else self.flushes[0])

    def shutdown(self) -> None:
        self.over = True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(flushes, coverage, workload)`: the engine that ran the job, and its token ids."""

    def start(
        flushes: list[bool], coverage: bool, steps: int | None = None, arguments: Any = None, load: Load | None = None,
        **workload: Any,
    ) -> tuple[Engine, Any]:  # fmt: skip
        session = Session(str(tmp_path / "shards"), check_coverage=coverage, steps=steps)
        session.write()
        if steps is not None:
            Counts(tmp_path / "shards" / "host-1.counts", create=True).cells[CLOSED] = 1
        made: list[Engine] = []
        engine = lambda **arguments: made.append(Engine(flushes, arguments, session)) or made[0]  # noqa: E731
        monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=engine))
        requests = SimpleNamespace(EmbeddingReqInput=SimpleNamespace)
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)
        monkeypatch.setattr(offline, "close_shards", lambda session: None)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setenv(offline.CPU_ENGINE, "1")
        job = {
            "session": str(session.file),
            "workload": workload,
            "engine_arguments": arguments or {"context_length": 64},
            "load": None if load is None else asdict(load),
        }
        (tmp_path / "job.json").write_bytes(orjson.dumps({**job, "outputs": str(tmp_path / "outputs.json")}))
        offline.main(str(tmp_path / "job.json"))
        return made[0], orjson.loads((tmp_path / "outputs.json").read_bytes())

    return start


def test_every_request_runs_once_and_its_tokens_are_kept(run: Any) -> None:
    engine, outputs = run([True], False, num_prompts=2, input_len=4, output_len=3)
    assert (engine.generated, outputs) == ([(2, 3, False)], [[7, 7, 7]] * 2)
    assert engine.over
    assert engine.arguments["context_length"] == 64


def test_what_runs_after_the_last_step_is_aborted(run: Any) -> None:
    engine, outputs = run([True], False, steps=3, num_prompts=2, input_len=4, output_len=100)
    assert (engine.generated, outputs) == ([(2, 100, False)], [[7, 7, 7], []])


def test_loads_run_one_after_another_and_share_the_profiled_steps(run: Any) -> None:
    engine, outputs = run([True], True, num_prompts=[1, 3, 2], input_len=[4, 5, 6], output_len=30)
    assert engine.generated == [(n, 8, True) for n in (1, 3, 2)] + [(n, 30, False) for n in (1, 3, 2)]
    assert [len(tokens) for tokens in outputs] == [30] * 6


def test_no_load_is_begun_after_the_last_step(run: Any) -> None:
    engine, outputs = run([True], False, steps=3, num_prompts=[2, 3], input_len=4, output_len=100)
    assert (engine.generated, outputs) == ([(2, 100, False)], [[7, 7, 7], [], [], [], []])


def test_without_a_number_of_steps_nothing_is_aborted(run: Any) -> None:
    engine, _ = run([True], False, num_prompts=2, input_len=4, output_len=3)
    assert not engine.aborted.is_set()


def test_texts_go_to_the_engine_as_texts(run: Any) -> None:
    engine, outputs = run([True], False, prompts=["a text", "another"], output_len=2)
    assert (engine.generated, outputs) == ([(2, 2, False)], [[7, 7]] * 2)


def test_texts_among_token_ids_go_to_the_engine_as_token_ids(run: Any) -> None:
    engine, outputs = run([True], False, prompts=[[5, 6], "a text"], output_len=2)
    assert (engine.generated, outputs) == ([(2, 2, False)], [[7, 7]] * 2)


def test_the_turns_of_a_trace_run_after_one_another_and_go_on_with_answers(run: Any) -> None:
    first = Request(0, None, 0.0, {}, 3, MadeUpPrompt([1], 16, 10))
    second = Request(1, 0, 0.0, {}, 2, MadeUpPrompt([1, 2], 16, 20, of_answer=3))
    engine, _ = run([True], False, num_prompts=1, input_len=20, output_len=3, load=Load([first, second]))
    (_, tokens, before), (_, more, prompt) = engine.generated
    assert (tokens, more, len(before), len(prompt)) == (3, 2, 10, 20)
    assert prompt[:13] == before + [7] * 3
    engine, _ = run([True], False, steps=3, num_prompts=1, input_len=20, output_len=3, load=Load([first]))
    assert engine.generated == [], "the window has closed"


def test_the_profiled_requests_come_first_and_are_forgotten(run: Any) -> None:
    engine, outputs = run([False, False, True], True, num_prompts=2, input_len=4, output_len=30)
    assert engine.generated == [(2, TOKENS, True), (2, 30, False)]
    assert {len(tokens) for tokens in outputs} == {30}


def test_a_radix_cache_that_cannot_be_emptied_ends_the_recording(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="radix cache"):
        run([False], True, num_prompts=1, input_len=4, output_len=3)
    assert not (tmp_path / "outputs.json").exists()


def test_without_a_gpu_the_cache_holds_the_requests(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    engine, _ = run([True], False, num_prompts=100, input_len=100, output_len=50)
    assert (engine.arguments["device"], engine.arguments["max_total_tokens"]) == ("cpu", 2 * 100 * 150)
    engine, _ = run([True], False, num_prompts=[1, 100, 50], input_len=[4096, 100, 100], output_len=50)
    assert engine.arguments["max_total_tokens"] == 2 * 100 * 150, "of the largest load"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    engine, _ = run([True], False, num_prompts=1)
    assert not {"device", "attention_backend", "max_total_tokens"} & set(engine.arguments)


def test_a_pooling_model_embeds_the_token_ids_of_each_load(run: Any) -> None:
    pooling = {"is_generation": False}
    engine, outputs = run([True], False, arguments=pooling, prompts=[[5, 6], "a text"], output_len=2)
    assert (engine.embedded, outputs, engine.generated) == ([[[5, 6], [1, 4]]], [[], []], [])
    engine, outputs = run([True], False, arguments=pooling, prompts=["a text"], output_len=2)
    assert (engine.embedded, outputs) == ([[[1, 4]]], [[]])
    engine, outputs = run([True], True, arguments=pooling, num_prompts=[1, 2], input_len=4, output_len=2)
    assert ([len(load) for load in engine.embedded], outputs) == ([1, 2, 1, 2], [[], [], []])


def test_a_pooling_model_embeds_the_requests_of_a_trace(run: Any) -> None:
    load = Load([Request(0, None, 0.0, {}, 3, MadeUpPrompt([1], 16, 10))])
    engine, _ = run([True], False, arguments={"is_generation": False}, num_prompts=1, output_len=3, load=load)
    assert [len(ids) for ids in engine.embedded] == [10]

"""Runs SGLang offline for a recording, in a process of its own: `python -m kcap.capture.engines.sglang.offline JOB`."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Prompt, Session, Workload, read_session
from kcap.capture.shards.counts import close_shards, window_over
from kcap.capture.turns.sender import Answer, Load, Outcome, Request, chat_tokens, report_outcome
from kcap.capture.window.profiled import profiled_loads

LEAST_CACHE = 4096  # tokens
FLUSHES = 50
POLL = 0.1  # seconds between two looks whether the last step that is wanted has ended
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def main(job_file: str) -> None:
    """Run the job: the session's file, the workload, the engine's arguments; `outputs` names where token ids go."""
    job = orjson.loads(Path(job_file).read_bytes())
    session = read_session(job["session"])
    workload = Workload(**job["workload"])
    arguments = {**of_this_machine(workload), **job["engine_arguments"]}
    from sglang import Engine

    engine = Engine(**arguments)
    loads = workload.loads(_vocabulary(engine))
    if session.check_coverage:
        _generate(engine, *profiled_loads(loads, workload.output_len), session)
        _forget_prompts(engine)
        session.profile_file.unlink()
    load = Load.of(job["load"]) if job.get("load") else None
    with _ending(engine, session):
        if load is None:
            outputs = _generate(engine, loads, workload.output_len, session)
        else:
            outcome, outputs = engine.loop.run_until_complete(_send(engine, load, session)), []
    close_shards(session)
    if job.get("outputs"):
        Path(job["outputs"]).write_bytes(orjson.dumps(outputs))
    engine.shutdown()
    if load is not None:
        report_outcome(outcome, len(load.requests))


def of_this_machine(workload: Workload) -> dict[str, Any]:
    """Without a GPU: PyTorch's attention, no graphs, and a cache that holds the largest load rather than all memory."""
    import torch

    if torch.cuda.is_available():
        return {}
    os.environ.setdefault(CPU_ENGINE, "1")
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.5,
        "max_total_tokens": max(LEAST_CACHE, 2 * workload.largest),
    }


def _vocabulary(engine: Any) -> int:
    return int(engine.tokenizer_manager.model_config.vocab_size)


def _generate(engine: Any, loads: list[list[Prompt]], tokens: int, session: Session) -> list[list[int]]:
    """Run the loads one after another until all are done or the window has closed; each request's token ids."""
    outputs: list[list[int]] = []
    for load in loads:
        outputs += _run(engine, load, tokens)
        if session.steps is not None and window_over(Path(session.directory)):
            break
    return outputs + [[] for _ in range(sum(map(len, loads)) - len(outputs))]


def _run(engine: Any, load: list[Prompt], tokens: int) -> list[list[int]]:
    """Submit every request at once; each one's token ids. Requests of token ids reach the scheduler together. SGLang
    takes no texts beside them: among such, and for a pooling model, texts become token ids here."""
    asked: dict[str, Any] = {"prompt": load}
    if not _generates(engine) or not all(isinstance(prompt, str) for prompt in load):
        asked = {"input_ids": [_ids(engine, prompt) if isinstance(prompt, str) else prompt for prompt in load]}
    outputs = engine.loop.run_until_complete(_answer(engine, tokens, **asked))
    return [list(output.get("output_ids", ())) for output in outputs]


async def _send(engine: Any, load: Load, session: Session) -> Outcome:
    """What would be sent after the window has closed is not."""

    async def ask(request: Request, prompt: list[int] | None) -> Answer:
        if session.steps is not None and window_over(Path(session.directory)):
            return Answer()
        ids = chat_tokens(engine.tokenizer_manager.tokenizer, request.body) if prompt is None else prompt
        output = await _answer(engine, request.tokens, input_ids=ids, rid=str(request.number))
        return Answer(tokens=list(output.get("output_ids", ())))

    return await load.send(ask)


async def _answer(engine: Any, tokens: int, **asked: Any) -> Any:
    """What the engine answers a request, or a list of them; a pooling model's answers have no token ids."""
    if _generates(engine):
        params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return await engine.async_generate(**asked, sampling_params=params)
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    return await anext(engine.tokenizer_manager.generate_request(EmbeddingReqInput(**asked)))


def _generates(engine: Any) -> bool:
    return bool(engine.tokenizer_manager.model_config.is_generation)


def _ids(engine: Any, text: str) -> list[int]:
    return list(engine.tokenizer_manager.tokenizer(text)["input_ids"])


@contextmanager
def _ending(engine: Any, session: Session) -> Iterator[None]:
    """Where the session names a number of steps, what still runs after the last one is aborted."""
    over = threading.Event()
    if session.steps is not None:
        threading.Thread(target=_abort_when_closed, args=(engine, session, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _abort_when_closed(engine: Any, session: Session, over: threading.Event) -> None:
    """Asked for again and again, for a request may still be on its way to the scheduler."""
    while not over.wait(POLL):
        if window_over(Path(session.directory)):
            abort = functools.partial(engine.tokenizer_manager.abort_request, abort_all=True)
            engine.loop.call_soon_threadsafe(abort)


def _forget_prompts(engine: Any) -> None:
    """Let the counted steps run as if those before had not been."""
    for _ in range(FLUSHES):
        if getattr(engine.flush_cache(), "success", True):
            return
        time.sleep(0.1)  # a batch is still being put away
    raise RuntimeError(
        "SGLang could not empty its radix cache after the profiled steps, so the counted prefills would be hits in it: "
        "record without --check-coverage, or with --engine-arg disable_radix_cache=true"
    )


if __name__ == "__main__":
    main(sys.argv[1])

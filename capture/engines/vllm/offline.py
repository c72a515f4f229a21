"""Runs vLLM offline for a recording, in a process of its own: `python -m kcap.capture.engines.vllm.offline JOB`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.engines.vllm.tokenizer import write_tokenizer
from kcap.capture.session import Prompt, Session, Workload, read_session
from kcap.capture.shards.counts import close_shards, window_over
from kcap.capture.turns.sender import Answer, Load, Outcome, Request, chat_tokens, report_outcome
from kcap.capture.window.profiled import profiled_loads


def main(job_file: str) -> None:
    job = orjson.loads(Path(job_file).read_bytes())
    session = read_session(job["session"])
    workload = Workload(**job["workload"])
    from vllm import LLM

    llm = LLM(**_with_tokenizer(job["engine_arguments"], Path(session.directory) / "tokenizer"))
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    loads = workload.loads(vocabulary)
    if session.check_coverage:
        _generate(llm, *profiled_loads(loads, workload.output_len), session)
        _forget_prompts(llm)
        session.profile_file.unlink()
    load = Load.of(job["load"]) if job.get("load") else None
    if load is None:
        outputs = _generate(llm, loads, workload.output_len, session)
    else:
        outcome, outputs = asyncio.run(_send(llm, load, session)), []
    close_shards(session)
    if job.get("outputs"):
        Path(job["outputs"]).write_bytes(orjson.dumps(outputs))
    if hasattr(llm.llm_engine, "engine_core"):
        llm.llm_engine.engine_core.shutdown()  # at the interpreter's exit its threads may still run, and abort
    if load is not None:
        report_outcome(outcome, len(load.requests))


CHOOSE_RUNNER = ("model", "runner", "convert", "trust_remote_code", "revision", "hf_overrides", "skip_tokenizer_init")


def _with_tokenizer(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The `arguments`, where they leave the tokenizer out of a pooling model, with one of made-up words in `folder`.

    vLLM starts no such model without a tokenizer, though its prompts are token ids.
    """
    from vllm.config import ModelConfig

    if not arguments.get("skip_tokenizer_init"):
        return arguments
    try:
        config = ModelConfig(**{name: arguments[name] for name in CHOOSE_RUNNER if name in arguments})
    except (ValueError, OSError):  # which LLM says with all its arguments
        return arguments
    if config.runner_type != "pooling":
        return arguments
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, config.get_vocab_size())
    return {**arguments, "skip_tokenizer_init": False, "tokenizer": str(folder)}


def _forget_prompts(llm: Any) -> None:
    """Let the counted steps run as if those before had not been."""
    if llm.reset_prefix_cache() not in (True, None):
        raise RuntimeError(
            "vLLM could not empty its prefix cache after the profiled steps (blocks of it are still held), so the "
            "counted prefills would be hits in it: record without --check-coverage, or with "
            "--engine-arg enable_prefix_caching=false"
        )


def _generate(llm: Any, loads: list[list[Prompt]], tokens: int, session: Session) -> list[list[int]]:
    """Run the loads one after another until all are done or the window has closed; each request's token ids.

    A pooling model generates none: of it each request is one forward.
    """
    done: dict[int, list[int]] = {}
    submitted = 0
    params = _params(llm.llm_engine, tokens)
    for load in loads:
        with _paused(llm.llm_engine):
            for number, prompt in enumerate(load, submitted):
                text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                llm.llm_engine.add_request(str(number), text, params)
        submitted += len(load)
        if not _finish(llm.llm_engine, done, session):
            break
    return [done.get(number, []) for number in range(sum(map(len, loads)))]


@contextmanager
def _paused(engine: Any) -> Iterator[None]:
    """Without steps while a load is submitted, so that every run of it has the same: an engine in a process of its own
    would begin with the requests that have come by then. Older ones cannot be paused, nor can replicas.
    """
    call = getattr(getattr(engine, "engine_core", None), "call_utility", None)
    if call is None or not _can_pause(engine):
        yield
        return
    call("pause_scheduler", "keep", False)
    yield
    call("resume_scheduler")


def _can_pause(engine: Any) -> bool:
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "pause_scheduler") and engine.vllm_config.parallel_config.data_parallel_size == 1


IDLE = 0.001  # seconds between two looks whether a request is due, while the engine has none
POOLING = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
)  # what is asked of a pooling model, the likeliest first


def _params(engine: Any, tokens: int) -> Any:
    """How each request is to be answered."""
    if engine.model_config.runner_type == "pooling":
        from vllm import PoolingParams

        offered = engine.get_supported_tasks()
        return PoolingParams(task=next((task for task in POOLING if task in offered), None))
    from vllm import SamplingParams

    detokenize = getattr(engine, "tokenizer", None) is not None
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=detokenize)


def _finish(engine: Any, done: dict[int, list[int]], session: Session) -> bool:
    """Step until nothing is left; False where the window has closed before."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[_number(output.request_id)] = _token_ids(output.outputs)
        if session.steps is not None and window_over(Path(session.directory)):
            return False
    return True


async def _send(llm: Any, load: Load, session: Session) -> Outcome:
    """Step the engine while there are requests; what would be sent after the window has closed is not."""
    engine, loop = llm.llm_engine, asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[list[int]]] = {}
    over = False

    async def ask(request: Request, prompt: list[int] | None) -> Answer:
        if over:
            return Answer()
        tokens = chat_tokens(llm.get_tokenizer(), request.body) if prompt is None else prompt
        engine.add_request(str(request.number), {"prompt_token_ids": tokens}, _params(engine, request.tokens))
        waiting[request.number] = loop.create_future()
        return Answer(tokens=await waiting[request.number])

    sending = asyncio.ensure_future(load.send(ask))
    while not sending.done():
        await asyncio.sleep(0 if waiting else IDLE)
        for output in engine.step() if waiting else ():
            if output.finished:
                waiting.pop(_number(output.request_id)).set_result(_token_ids(output.outputs))
        if not over and session.steps is not None and window_over(Path(session.directory)):
            over = True
            for future in waiting.values():
                future.set_result([])
            waiting = {}
    return await sending


def _token_ids(outputs: Any) -> list[int]:
    """Of a request's `outputs`: a list of generated ones, or what a pooling model returns."""
    return list(outputs[0].token_ids) if isinstance(outputs, list) else []


def _number(request_id: str) -> int:
    return int(request_id.split("-")[0])


if __name__ == "__main__":
    main(sys.argv[1])

"""Runs vLLM offline for a recording, in a process of its own: `python -m kcap.capture.engines.vllm.offline JOB`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Prompt, Session, Workload, no_tokens_text, read_session
from kcap.capture.shards.counts import close_shards, window_over
from kcap.capture.window.profiled import profiled_loads


def main(job_file: str) -> None:
    job = orjson.loads(Path(job_file).read_bytes())
    session = read_session(job["session"])
    workload = Workload(**job["workload"])
    from vllm import LLM

    _refuse_pooling(job["engine_arguments"])
    llm = LLM(**job["engine_arguments"])
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    loads = workload.loads(vocabulary)
    if session.check_coverage:
        _generate(llm, *profiled_loads(loads, workload.output_len), session)
        _forget_prompts(llm)
        session.profile_file.unlink()
    outputs = _generate(llm, loads, workload.output_len, session)
    close_shards(session)
    if job.get("outputs"):
        Path(job["outputs"]).write_bytes(orjson.dumps(outputs))


CHOOSE_RUNNER = ("model", "runner", "trust_remote_code", "revision", "hf_overrides", "tokenizer", "skip_tokenizer_init")


def _refuse_pooling(arguments: dict[str, Any]) -> None:
    """Before weights are loaded: RuntimeError for a model that vLLM would run with no sampling."""
    from vllm.config import ModelConfig

    try:
        runner = ModelConfig(**{name: arguments[name] for name in CHOOSE_RUNNER if name in arguments}).runner_type
    except (ValueError, OSError):  # which LLM says with all its arguments
        return
    if runner == "pooling":
        raise RuntimeError(no_tokens_text(arguments["model"]))


def _forget_prompts(llm: Any) -> None:
    """Let the counted steps run as if those before had not been."""
    if llm.reset_prefix_cache() not in (True, None):
        raise RuntimeError(
            "vLLM could not empty its prefix cache after the profiled steps (blocks of it are still held), so the "
            "counted prefills would be hits in it: record without --check-coverage, or with "
            "--engine-arg enable_prefix_caching=false"
        )


def _generate(llm: Any, loads: list[list[Prompt]], tokens: int, session: Session) -> list[list[int]]:
    """Run the loads one after another until all are done or the window has closed; each request's token ids."""
    done: dict[int, list[int]] = {}
    submitted = 0
    for load in loads:
        _submit(llm.llm_engine, load, submitted, tokens)
        submitted += len(load)
        if not _finish(llm.llm_engine, done, session):
            break
    return [done.get(number, []) for number in range(sum(map(len, loads)))]


def _submit(engine: Any, load: list[Prompt], first: int, tokens: int) -> None:
    """Submit every request of a load, the first as number `first`."""
    from vllm import SamplingParams

    detokenize = getattr(engine, "tokenizer", None) is not None
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=detokenize)
    for number, prompt in enumerate(load, first):
        text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        engine.add_request(str(number), text, params)


def _finish(engine: Any, done: dict[int, list[int]], session: Session) -> bool:
    """Step until nothing is left; False where the window has closed before."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[_number(output.request_id)] = list(output.outputs[0].token_ids)
        if session.steps is not None and window_over(Path(session.directory)):
            return False
    return True


def _number(request_id: str) -> int:
    return int(request_id.split("-")[0])


if __name__ == "__main__":
    main(sys.argv[1])

"""Runs TensorRT-LLM offline for a recording: `python -m kcap.capture.engines.trtllm.offline JOB`.

Its workers, which MPI starts, import the main module again: what runs stands under the guard at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from kcap.capture.session import Prompt, Session, Workload, read_session
from kcap.capture.shards.counts import close_shards, window_over
from kcap.capture.window.profiled import profiled_loads


def main(job_file: str) -> None:
    job = orjson.loads(Path(job_file).read_bytes())
    session, arguments = read_session(job["session"]), job["engine_arguments"]
    workload = Workload(**job["workload"])
    from tensorrt_llm import LLM

    if session.check_coverage:  # or the counted prefills would be hits in what the profiled steps computed
        arguments = {**arguments, "kv_cache_config": {"enable_block_reuse": False, **_cache(arguments)}}
    llm = LLM(**arguments)
    loads = workload.loads(_vocabulary(arguments))
    if session.check_coverage:
        _generate(llm, *profiled_loads(loads, workload.output_len), session)
        session.profile_file.unlink()
    outputs = _generate(llm, loads, workload.output_len, session)
    close_shards(session)
    if job.get("outputs"):
        Path(job["outputs"]).write_bytes(orjson.dumps(outputs))
    llm.shutdown()


def _cache(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments.get("kv_cache_config") or {}


def _vocabulary(arguments: dict[str, Any]) -> int:
    """Of the model: as its directory's config.json has it, else the hub's."""
    file = Path(arguments["model"]) / "config.json"
    if not file.is_file():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(arguments["model"], "config.json"))
    config = orjson.loads(file.read_bytes())
    return int((config.get("text_config") or config)["vocab_size"])


def _generate(llm: Any, loads: list[list[Prompt]], tokens: int, session: Session) -> list[list[int]]:
    """Run the loads one after another until all are done or the window has closed; each request's token ids."""
    from tensorrt_llm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, end_id=-1, pad_id=-1, detokenize=False)
    done: list[list[int]] = []
    for load in loads:
        done += [list(output.outputs[0].token_ids) for output in llm.generate(load, params)]
        if session.steps is not None and window_over(Path(session.directory)):
            break
    return done + [[]] * (sum(map(len, loads)) - len(done))


if __name__ == "__main__":
    main(sys.argv[1])

"""What a worker runs. Its executor outlives a request."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any


def run_worker(prompts: list[list[int]], max_tokens: int, arguments: dict[str, Any]) -> list[list[int]]:
    return _executor(**{**arguments, "model_kwargs": None, "kv_cache_config": None}).run(prompts, max_tokens)


@cache
def _executor(backend: str = "pytorch", **arguments: Any) -> Any:
    """The creators are imported here, as the real worker does, and by name."""
    if backend == "_autodeploy":
        from tensorrt_llm._torch.auto_deploy.shim.ad_executor import create_autodeploy_executor as create
    else:
        from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor as create
    executor = create(SimpleNamespace(**arguments))
    executor.start_worker()
    return executor

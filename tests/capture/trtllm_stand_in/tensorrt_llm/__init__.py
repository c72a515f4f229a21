"""A stand-in for TensorRT-LLM: module, class and method names of 1.2, and its order of calls, around a toy model.

None of its code is the real engine's, and no kernel. What runs with it shows that kcap's hooks do what they should
where these names are; it does not show that the real engine has them.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

from tensorrt_llm.worker import run_worker

__version__ = "1.2.1+stand.in"


class SamplingParams:
    def __init__(self, max_tokens: int = 8, **_: Any) -> None:
        self.max_tokens = max_tokens


class LLM:
    """Its workers are processes of MPI, or this one with TLLM_WORKER_USE_SINGLE_PROCESS=1."""

    def __init__(self, model: str, tensor_parallel_size: int = 1, **arguments: Any) -> None:
        self._arguments = {"model": model, **arguments}
        self._size, self._pool = tensor_parallel_size, None
        if os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") != "1":
            from mpi4py.futures import MPIPoolExecutor

            self._pool = MPIPoolExecutor(max_workers=self._size, path=sys.path)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        job = (prompts, params.max_tokens, self._arguments)
        if self._pool is None:
            tokens = run_worker(*job)
        else:
            jobs = [self._pool.submit(run_worker, *job) for _ in range(self._size)]
            tokens = jobs[0].result()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in tokens]

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
